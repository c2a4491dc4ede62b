"""The tools, one file a toolset."""

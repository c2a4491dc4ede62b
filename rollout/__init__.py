"""One sample becomes one row, and rows become files."""

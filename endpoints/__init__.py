"""Models that come with the program."""

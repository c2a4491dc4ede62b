"""Where commands run. ``BACKENDS`` is the whole list."""

"""Every format, at every head size: one loop, and a reader for each format."""

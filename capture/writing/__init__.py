"""Writing of recorded calls to files: blocks, periodic writing, limits, and the flight recorder."""

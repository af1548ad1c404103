"""Writing of calls to files: blocks, flushing, limits, and the flight recorder."""

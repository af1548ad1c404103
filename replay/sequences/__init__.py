"""Step replay: runs all calls of a trace in order, each on the results of earlier calls."""

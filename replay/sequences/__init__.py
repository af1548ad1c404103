"""Step replay: all calls of a trace in order, with the dataflow between them."""

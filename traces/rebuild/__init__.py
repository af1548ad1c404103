"""Construction of live arguments from the content of a trace."""

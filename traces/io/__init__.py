"""Files of traces: reading and writing."""

"""What a trace says: dataflow, differences, parts, faults, long-tail functions, ranks."""

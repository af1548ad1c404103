"""Analyses of traces: dataflow, differences, parts, validation, long-tail functions, ranks, redaction."""

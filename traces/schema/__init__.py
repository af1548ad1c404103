"""Types of a trace: records, arguments, tensors and value models."""

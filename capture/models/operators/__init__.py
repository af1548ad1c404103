"""Calls of operators outside of any model: from torch's table of sample inputs, and made from schemas."""

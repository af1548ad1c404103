"""Calls of operators outside of any model, from torch's tables of sample inputs, schemas and traces."""

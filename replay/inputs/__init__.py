"""Regenerate the arguments of a call: metadata, memory, values."""

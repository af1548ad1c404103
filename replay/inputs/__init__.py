"""Makes the arguments of a call again: metadata, memory, values."""

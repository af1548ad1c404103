"""Generation of a call's arguments: metadata, memory and values."""

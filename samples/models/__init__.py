"""Models built from samples, so that a capture needs no other package."""

"""Decoding, routing and bookkeeping of sequences."""

"""Encoding of boxes as regression targets, and decoding of predictions."""

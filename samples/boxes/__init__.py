"""Boxes and overlaps."""

"""Anchors and locations."""

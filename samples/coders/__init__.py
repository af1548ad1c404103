"""Boxes to and from what a network predicts."""

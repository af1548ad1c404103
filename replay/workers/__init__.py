"""Processes that run cases, and the journal of their results."""

"""Processes that cases run in, and what is kept of their results meanwhile."""

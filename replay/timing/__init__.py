"""Run a call repeatedly under given conditions, and time it."""

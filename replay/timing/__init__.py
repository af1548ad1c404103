"""Runs a call again and again, under the circumstances that are wanted, and says what it takes."""

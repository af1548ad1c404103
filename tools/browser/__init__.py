"""Walks a table of results by keyboard, in the terminal."""

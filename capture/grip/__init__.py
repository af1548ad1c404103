"""Grip functions: record their calls, and extract their source as a sample that runs on its own."""

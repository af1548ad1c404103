"""Gripping of functions: recording their calls, and writing their source and calls as a sample."""

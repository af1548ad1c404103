"""Gripping of functions: recording their calls, and extracting their source as a sample that runs without the
program.
"""

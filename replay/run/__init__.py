"""Preparation, checks and timing of cases."""

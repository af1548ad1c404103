"""Conversion of records to and from JSON."""

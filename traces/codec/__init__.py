"""Records to and from JSON."""

"""Recording on demand of running processes."""

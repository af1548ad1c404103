"""A whole trace, and tables of its calls."""

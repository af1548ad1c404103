"""Python files for users: recorded cases that run with torch alone, and starting points of candidates."""

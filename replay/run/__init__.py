"""How a case becomes result rows: preparation, a check of the results, and timing."""

"""Makes of cases rows: prepares them, checks them, times them."""

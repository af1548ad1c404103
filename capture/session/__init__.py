"""A capture of a program: its options, results, schedule and cost."""

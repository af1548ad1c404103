"""A capture: its options, results, schedule and cost."""

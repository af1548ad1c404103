"""A capture: its parts, schedule, processes and cost."""

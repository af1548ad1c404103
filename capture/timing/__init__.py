"""Times of calls: the host, devices, page faults, and what a capture itself costs."""

"""Times of calls: host time, device time, page faults, and the capture's own cost."""

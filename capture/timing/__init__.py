"""Times of calls: host time, device time, page faults, and the time that the capture itself takes."""

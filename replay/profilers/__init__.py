"""What profilers see of a replay, and what they say of it."""

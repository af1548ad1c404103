"""What profilers have in common: programs that run cases once more and tell what they saw."""

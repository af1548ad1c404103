"""Nsight Systems: a replay under `nsys profile`, and what its report says of each row."""

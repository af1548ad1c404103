"""Simulated accelerator for tests: devices `sim:0` and `sim:1`, which reject operations that CUDA forbids."""

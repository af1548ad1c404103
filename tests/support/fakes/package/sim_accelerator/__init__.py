"""A simulated accelerator for tests: devices `sim:0` and `sim:1`, which fail at what CUDA forbids."""

"""The machine: devices, measured facts, contention, and private interfaces of torch."""

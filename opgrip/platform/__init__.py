"""Facts about the machine: devices, measured speeds, contention, and private interfaces of torch."""

"""The watched program: where it is, its settings, devices, ranks and environment."""

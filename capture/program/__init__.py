"""Facts about the recorded program: its location, settings, devices, processes and environment."""

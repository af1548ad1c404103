"""Facts about the recorded program: location, settings, devices, processes and environment."""

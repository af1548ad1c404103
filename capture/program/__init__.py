"""The watched program: current location, settings, devices, processes and environment."""

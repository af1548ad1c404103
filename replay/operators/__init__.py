"""What a case calls: operators by name, settings, devices, memory and work."""

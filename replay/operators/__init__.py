"""The operators that a case calls: lookup by name, settings, devices, memory and work."""

"""Operators that cases call: lookup by name, settings, devices, memory use, and operations and bytes."""

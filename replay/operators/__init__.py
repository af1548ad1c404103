"""The operators that cases call: lookup by name, torch settings, devices, memory use, and counts of operations."""

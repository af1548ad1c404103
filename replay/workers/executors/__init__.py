"""Executors of cases. Each is a file here, or an entry point `opgrip.engines` of a package."""

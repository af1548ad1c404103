"""What runs cases. An executor is a file here, or an entry point `opgrip.engines` of a package."""

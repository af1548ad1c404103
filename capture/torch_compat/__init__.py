"""Private interfaces of torch that the capture package uses."""

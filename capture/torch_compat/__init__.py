"""Private interfaces of torch that capture uses."""

"""Live arguments made of what a trace holds."""

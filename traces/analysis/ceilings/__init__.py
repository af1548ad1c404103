"""What a machine gives at most."""

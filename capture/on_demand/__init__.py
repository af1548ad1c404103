"""A process that can be asked to record: what listens in it, what records its steps, and who asks."""

"""The score: one number that says how fast a device or compiler runs real models, relative to a baseline."""

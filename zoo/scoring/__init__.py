"""The score: one number for how fast a device or compiler runs real models, relative to a baseline."""

"""What torch, a mode, a device or another tool has of a corpus, and the other way round."""

"""The same calls at other sizes than the recorded ones."""

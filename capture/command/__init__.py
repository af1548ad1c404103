"""The command opcapture."""

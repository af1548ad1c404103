"""Replay of calls with a larger batch size than the recorded one."""

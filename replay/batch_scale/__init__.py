"""Replay of calls with a batch that is larger than the recorded one."""

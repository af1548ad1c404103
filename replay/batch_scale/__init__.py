"""Calls at other batch sizes than the recorded one."""

"""The command `opreplay`, the Python API of a replay, and replays of several traces."""

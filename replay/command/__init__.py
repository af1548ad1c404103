"""The command `opreplay`, the Python functions that replay, benchmark and judge, and replays of several traces."""

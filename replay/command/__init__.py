"""The command opreplay, the Python calls, and replays of several traces."""

"""Cases, which are the units of replay, and the sources from which they are created."""

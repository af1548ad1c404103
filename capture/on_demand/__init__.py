"""Recording on demand: an agent in a running process, its recordings of steps, and clients that request recordings."""

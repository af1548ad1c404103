"""Recording on demand: an agent in a process, its recordings of steps, and clients that request recordings."""

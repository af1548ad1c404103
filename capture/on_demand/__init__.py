"""Recording on demand: the agent in a process, the recording of its steps, and the clients that request it."""

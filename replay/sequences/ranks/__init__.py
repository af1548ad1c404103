"""Step replay by several ranks: each process runs the calls of one rank, and collectives run between them."""

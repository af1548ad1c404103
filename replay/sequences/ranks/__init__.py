"""Step replay by several ranks: each process runs the calls of one rank, and real collectives connect them."""

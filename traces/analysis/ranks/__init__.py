"""Analysis of traces of several ranks: shared collectives, a common clock, and which rank waited for which."""

"""Analysis of traces of several ranks: shared collectives, a common clock, and the time that ranks wait."""

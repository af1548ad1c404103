"""How much a call has to compute and to move."""

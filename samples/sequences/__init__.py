"""Functions that decode sequences, route their tokens, and keep their masks, positions and caches."""

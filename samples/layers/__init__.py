"""Attention, embeddings and other parts of networks."""

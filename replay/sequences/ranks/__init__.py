"""Replays a step of several ranks as one: each process takes a rank's calls, and collectives run between them."""

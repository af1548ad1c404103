"""Losses, and the weights and targets that they need."""

"""Signatures of calls: their keys, prediction of the next call, and tensors' values and layouts."""

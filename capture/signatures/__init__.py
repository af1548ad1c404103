"""Signatures of calls: keys, predictions, values and layouts of tensors."""

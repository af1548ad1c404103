"""Signatures of calls: keys for looking them up, predictions of the next call, and values and layouts of tensors."""

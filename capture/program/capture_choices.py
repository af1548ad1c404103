"""What a capture can be asked for, in the words of its options."""

from __future__ import annotations

SKETCH, FULL = VALUES = ("sketch", "full")
"""What is kept of tensors' values: a model, or all of them."""
VALUE_SHARE = 0.2
"""Of the program's time that looks at values of later calls may take."""
OPERATORS, OPAQUE = COMPILED = ("operators", "opaque")
"""What a compiled region is recorded as: the operators that it was made of, or one call."""
EVENTS, KERNELS = DEVICE_TIMES = ("events", "kernels")
"""How calls are timed on an accelerator: from an event before to one after, or by its own records of kernels."""
KNOWN_EXTENSIONS = ("mmcv._ext",)
"""Extension modules that are watched wherever the program has loaded them."""
CALLS = 3
"""Distinct signatures of a gripped function whose calls are kept."""
GRIPS = "grips"
"""The folder that samples are written into where none is named: `samples` stands for those that ship."""

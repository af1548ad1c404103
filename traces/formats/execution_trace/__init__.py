"""Readers and writers of execution traces of PyTorch and Chakra, whose nodes form a tree."""

from opgrip.traces.formats.execution_trace import chakra as chakra
from opgrip.traces.formats.execution_trace import observer as observer

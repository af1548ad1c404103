"""Readers and writers of execution traces of PyTorch and Chakra, whose nodes form a tree."""

from opgrip.traces.formats.execution_trace import files as files

"""Nodes of execution traces: what torch's observer and Chakra both write of a program, and its calls.

`node.py` says what a node is; `calls.py` makes calls of nodes and `program.py` nodes of a trace. The files that hold
nodes are formats of their own.
"""

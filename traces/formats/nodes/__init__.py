"""Nodes of execution traces, which torch's observer and Chakra both write, and conversions from and to calls.

`node.py` defines nodes, `node_calls.py` makes calls of nodes, and `program.py` makes nodes of a trace. The files that
contain nodes are separate formats.
"""

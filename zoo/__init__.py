"""The benchmark built on traces: their corpus, distilled traces, and how the traces that ship are made."""

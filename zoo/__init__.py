"""The benchmark built on traces: corpus, distilled traces, scores, and the recipes of the traces that ship."""

"""Corpus, distilled traces, scores, and the commands that recorded the shipped traces."""

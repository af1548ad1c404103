"""Rows of results: columns, repeats, ratios and where rows come from."""

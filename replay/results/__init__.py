"""Result rows: their columns, repeats, ratios to other rows, verdicts on candidates, and origins."""

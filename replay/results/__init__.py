"""Result rows: columns, repeats, ratios, and origins."""

"""Result rows: columns, repeats, ratios, and the origin of rows."""

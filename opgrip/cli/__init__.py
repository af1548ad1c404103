"""Command lines: options, parsing, help, progress, suggestions and output files."""

"""Tables, figures and HTML fragments."""

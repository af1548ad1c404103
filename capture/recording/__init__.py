"""Tables, blocks and files of a recording."""

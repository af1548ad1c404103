"""Files of other tools, read and written as traces. A format is a file here, or an entry point `opgrip.formats`."""

"""Readers and writers of other tools' files. A format is a file in this folder or an entry point `opgrip.formats`."""

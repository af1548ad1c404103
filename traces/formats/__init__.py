"""Readers and writers of other tools' files. Each format is a module in this folder, or an entry point
`opgrip.formats`.
"""

"""Programs built on capture and replay: the command `opgrip`, the decorator `grip`, the pytest plug-in and the HTML
report.
"""

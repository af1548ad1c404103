"""Programs built on capture and replay: the command `opgrip`, `grip`, the pytest plug-in and the HTML report."""

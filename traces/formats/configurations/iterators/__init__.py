"""How a configuration is expanded. An iterator is a file here, or an entry point `opgrip.iterators`."""

from opgrip.traces.formats.configurations.iterators.iterator import Expand, iterators

__all__ = ["Expand", "iterators"]

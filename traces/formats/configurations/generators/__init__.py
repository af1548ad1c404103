"""What arguments are made of an entry. A generator is a file here, or an entry point `opgrip.generators`."""

from opgrip.traces.formats.configurations.generators.generator import Arguments, Draw, Generate, generators

__all__ = ["Arguments", "Draw", "Generate", "generators"]

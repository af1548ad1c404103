"""The verbs of `opgrip`. Each is a module of this package, or an entry point `opgrip.verbs` of another package."""

from opgrip.tools.verbs.verb import Verb, verbs

__all__ = ["Verb", "verbs"]

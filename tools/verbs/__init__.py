"""The verbs of `opgrip`. A verb is a file here, or an entry point `opgrip.verbs` of another package."""

from opgrip.tools.verbs.verb import Verb, verbs

__all__ = ["Verb", "verbs"]

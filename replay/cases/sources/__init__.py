"""Sources of cases; a source is a file of this package, or an entry point `opgrip.sources` of another package."""

from opgrip.replay.cases.sources.source import NO_TRACE, CaseSet, Source, source_of, sources

__all__ = ["NO_TRACE", "CaseSet", "Source", "source_of", "sources"]

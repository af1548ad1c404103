"""Several traces in one table, and what they say together."""

from opgrip.traces.corpus.corpus import Corpus, read_corpus
from opgrip.traces.corpus.members import Member, members_of
from opgrip.traces.corpus.summaries import BY, Summary, summarize

__all__ = ["BY", "Corpus", "Member", "Summary", "members_of", "read_corpus", "summarize"]

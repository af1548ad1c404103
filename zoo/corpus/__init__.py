"""A corpus: several traces as one table, and summaries of that table."""

from opgrip.zoo.corpus.corpus import Corpus, Member, members_of, read_corpus
from opgrip.zoo.corpus.summaries import BY, Summary, summarize

__all__ = ["BY", "Corpus", "Member", "Summary", "members_of", "read_corpus", "summarize"]

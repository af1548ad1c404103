"""What torch, a mode or a device has of a corpus, and the other way round."""

from opgrip.tools.corpus.coverage import cover, summarize_coverage
from opgrip.tools.corpus.lacking import Trial, find_lacking

__all__ = ["Trial", "cover", "find_lacking", "summarize_coverage"]

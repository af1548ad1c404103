"""Long-tail functions of real models, each a module that stands on its own, in plain torch."""

from opgrip.samples.sample import Draw, Sample, sample, samples
from opgrip.samples.tags import Tag, tag_of

__all__ = ["Draw", "Sample", "Tag", "sample", "samples", "tag_of"]

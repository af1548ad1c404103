"""Long-tail functions of real models in plain torch, one self-contained module each."""

from opgrip.samples.sample import Draw, Sample, sample, samples
from opgrip.samples.tags import Tag, tag_of

__all__ = ["Draw", "Sample", "Tag", "sample", "samples", "tag_of"]

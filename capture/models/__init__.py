"""Sources of models that `--model` accepts. Other packages add some by entry points `opgrip.model_sources`."""

from opgrip.capture.models.sources import ModelSource, load_program, model_sources, source_of

__all__ = ["ModelSource", "load_program", "model_sources", "source_of"]

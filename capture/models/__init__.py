"""Sources of models. A source is a module in this package, or an entry point `opgrip.model_sources` of another
package.
"""

from opgrip.capture.models.program import ModelSource, load_program, model_sources, source_of

__all__ = ["ModelSource", "load_program", "model_sources", "source_of"]

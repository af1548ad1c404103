"""Value models: compact descriptions of a tensor's values, from which similar values are drawn."""

from opgrip.traces.schema.records import Drawable, ValueModel
from opgrip.traces.values.model import fit, value_model_from_json, value_model_to_json, value_models
from opgrip.traces.values.needs import (
    depends_on_values,
    fit_argument,
    has_needs,
    is_refined,
    reads_places,
    refine_model,
    requested_kinds,
    sizes_outputs,
)

__all__ = [
    "Drawable",
    "ValueModel",
    "depends_on_values",
    "fit",
    "fit_argument",
    "has_needs",
    "is_refined",
    "reads_places",
    "refine_model",
    "requested_kinds",
    "sizes_outputs",
    "value_model_from_json",
    "value_model_to_json",
    "value_models",
]

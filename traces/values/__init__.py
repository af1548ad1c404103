"""Value models: what is kept of a tensor's values, enough to draw others that make an operator behave the same."""

from opgrip.traces.values.model import (
    Drawable,
    ValueModel,
    fit,
    value_model_from_json,
    value_model_to_json,
    value_models,
)

__all__ = ["Drawable", "ValueModel", "fit", "value_model_from_json", "value_model_to_json", "value_models"]

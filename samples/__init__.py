"""Long-tail functions of real models, each a module that stands on its own, in plain torch."""

"""Assignment of ground truth to predictions, and sampling of the assigned boxes."""

"""Functions of boxes and masks: areas, overlaps, conversions, cropping, pooling and non-maximum suppression."""

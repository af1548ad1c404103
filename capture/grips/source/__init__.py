"""From a live function to a module text that stands alone, and the sample folder around it."""

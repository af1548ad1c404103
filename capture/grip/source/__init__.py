"""From a live function to the text of a module that runs alone, and the sample folder around it."""

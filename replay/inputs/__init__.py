"""Generation of a call's arguments from the metadata and value models that a trace records."""

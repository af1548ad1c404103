"""Generation of a call's arguments from the metadata and value models of a trace."""

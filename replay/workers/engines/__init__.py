"""Who runs the cases: processes of this machine, or those of a cluster. An engine is a file here, or an entry point."""

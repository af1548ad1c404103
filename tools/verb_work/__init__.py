"""Work of the subcommands of `opgrip`; each module is imported when one of its subcommands runs."""

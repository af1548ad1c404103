"""What the subcommands of `opgrip` do; each module is imported when one of its subcommands runs."""

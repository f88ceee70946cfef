"""What the subcommands of the command line do; each module is one of them."""

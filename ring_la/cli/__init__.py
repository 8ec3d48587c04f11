"""The command line ``ring-la``: one module a subcommand, listed in `main.COMMANDS`."""

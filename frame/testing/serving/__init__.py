"""HTTP extensions, subcommands and stat loggers: the suites."""

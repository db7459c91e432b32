"""The command line: a module per verb, each with SUMMARY, EXAMPLES, ``add_arguments(parser)``, ``run(args) -> int``."""

"""Tools behind the command line: benchmarks, evaluation, scaffolds."""

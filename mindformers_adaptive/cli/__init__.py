"""The command-line program ``adaptive-loss-scale``, with one module for each subcommand."""

"""The command-line program ``adaptive-loss-scale``, one file a subcommand."""

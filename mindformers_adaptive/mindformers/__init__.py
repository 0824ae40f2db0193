"""Integration with MindFormers: registration, launcher, trainer, and measurements for the training of a YAML file."""

"""Integration with MindFormers: registration, launcher, trainer, and measurements of the training in a YAML file."""

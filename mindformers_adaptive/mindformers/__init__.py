"""Into MindFormers: registration, the launcher, the trainer, and measuring a training from its YAML file."""

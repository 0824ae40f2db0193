"""Pictures of runs, gradients and rules. They need matplotlib: ``pip install '.[plot]'``."""

"""Pictures of runs, gradients and policies. They need matplotlib: ``pip install '.[plot]'``."""

"""The public names, for editors and type checkers."""

from mindformers_adaptive.amp.simulated_formats import RoundToFormat as RoundToFormat
from mindformers_adaptive.amp.simulated_formats import simulated_products as simulated_products

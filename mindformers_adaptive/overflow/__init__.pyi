"""The public names, for editors and type checkers."""

from mindformers_adaptive.overflow.explanation import Explanation as Explanation

"""Rules of loss scaling in plain Python and NumPy. A rule of one's own is a :class:`TextRule`."""

from mindformers_adaptive.rules.base import Field, Rule
from mindformers_adaptive.rules.text_rule import TextRule

__all__ = ["Field", "Rule", "TextRule"]

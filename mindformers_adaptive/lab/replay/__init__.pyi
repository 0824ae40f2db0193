"""The public names, for editors and type checkers."""

from mindformers_adaptive.lab.replay.simulate import replay as replay

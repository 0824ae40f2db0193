"""Turn Megatron-LM's arguments into the scale_sense section of a YAML file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import yaml

from mindformers_adaptive.rule.megatron import scale_sense_from_megatron

__all__ = ["forward"]

_USAGE = """\
usage: adaptive-loss-scale megatron [ARGUMENT OF MEGATRON-LM ...]

Turn Megatron-LM's arguments into the scale_sense section of a YAML file. Those that do not concern loss scaling are
left alone, so a whole command line may be given, also as one text in quotation marks.

example:
  adaptive-loss-scale megatron --fp16 --initial-loss-scale 65536 --loss-scale-window 500
"""


def forward(arguments: Sequence[str]) -> int:
    """Print the section; return the exit code."""
    words = [word for argument in arguments for word in shlex.split(argument)]
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if words else 2
    try:
        section = scale_sense_from_megatron(words)
    except ValueError as error:
        print(f"adaptive-loss-scale megatron: error: {error}", file=sys.stderr)
        return 2
    print(yaml.safe_dump(section, sort_keys=False), end="")
    return 0

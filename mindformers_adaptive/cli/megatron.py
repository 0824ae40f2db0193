"""Turn Megatron-LM's arguments into a section to paste into a YAML file of MindFormers.

Arguments that do not concern loss scaling are ignored, so a whole command line may be given, also as one quoted
string.

example:
  adaptive-loss-scale megatron --fp16 --initial-loss-scale 65536 --loss-scale-window 500
"""

import argparse
import shlex
import sys
import warnings

import yaml

from mindformers_adaptive.cli.output import UsageError, print_text, wrong_usage
from mindformers_adaptive.rules.megatron import scale_sense_from_megatron


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Collect all of Megatron-LM's arguments as they are, without declaring them."""
    parser.usage = "%(prog)s [-h] [--traceback] [ARGUMENT OF MEGATRON-LM ...]"
    parser.set_defaults(others=[])


def run(options: argparse.Namespace) -> None:
    """Print the loss-scaling section for the YAML file."""
    with wrong_usage("Megatron-LM's arguments cannot be split into words: "):
        words = [word for argument in options.others for word in shlex.split(argument) if word != "--"]
    if not words:
        raise UsageError("give the arguments of Megatron-LM's training command, such as --loss-scale-window 1000")
    with wrong_usage(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        section = scale_sense_from_megatron(words)
    for warning in caught:
        print_text(f"warning: {warning.message}", file=sys.stderr)
    section = {"runner_wrapper": {"type": "MFTrainOneStepCell", "scale_sense": section}}
    print(yaml.safe_dump(section, sort_keys=False), end="")

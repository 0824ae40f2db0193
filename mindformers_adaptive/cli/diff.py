"""Compare two checkpoints, or the gradients that `probe --gradients` wrote on two devices: the error of each Parameter.

The second file is the reference. The relative error is the norm of the difference, as a multiple of the norm of the
reference; the worst Parameter comes first. In a folder the newest checkpoint is used.

examples:
  adaptive-loss-scale diff output/checkpoint/rank_0 other/checkpoint/rank_0
  adaptive-loss-scale diff npu.safetensors gpu.safetensors --modules model.layers.0 --worst 10
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from mindformers_adaptive.cli.output import add_output_arguments, integer, print_result
from mindformers_adaptive.gradients.difference import compare_arrays, difference_table
from mindformers_adaptive.gradients.selection import group_of_modules

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``diff``."""
    parser.add_argument("first", metavar="FILE", help="a .ckpt or .safetensors file, or a folder of them")
    parser.add_argument("reference", metavar="REFERENCE", help="a file or folder of the same kind, to compare with")
    parser.add_argument(
        "--modules", nargs="+", default=[], metavar="MODULE", help="show only these modules or Parameters, or *"
    )
    parser.add_argument("--worst", type=integer(1), metavar="N", help="show the N worst only; default: all")
    add_output_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """Read two checkpoints, and print for each Parameter how far the first differs from the reference."""
    with contextlib.redirect_stdout(sys.stderr):
        from mindformers_adaptive.mindformers.checkpoint_arrays import read_arrays

        (first, step), (reference, reference_step) = read_arrays(options.first), read_arrays(options.reference)
    if options.modules:
        group = group_of_modules(options.modules, list(dict.fromkeys([*first, *reference])))
        first, reference = ({name: arrays[name] for name in arrays if group(name)} for arrays in (first, reference))
    differences = compare_arrays(first, reference)
    only = {options.first: sorted(first.keys() - reference), options.reference: sorted(reference.keys() - first)}

    def text() -> str:
        same = sum(difference.relative_error == 0 for difference in differences)
        lines = [
            difference_table(differences[: options.worst]),
            "",
            f"{same} of {len(differences)} Parameters are equal.",
        ]
        if step != reference_step and None not in (step, reference_step):
            lines.append(f"The steps differ: {step} and {reference_step}.")
        lines += [f"Only in {path}: {len(names)}, such as {names[0]}." for path, names in only.items() if names]
        return "\n".join(lines)

    def content() -> dict[str, object]:
        steps = {"step": step, "reference_step": reference_step}
        return {**steps, "parameters": [difference._asdict() for difference in differences], "only_in": only}

    print_result(options, content, text)

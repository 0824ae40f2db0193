"""Compare two checkpoints, or the gradients that `probe --gradients` wrote on two devices: the error of each Parameter.

The second file is the reference. The relative error is the norm of the difference, as a multiple of the norm of the
reference; the worst Parameter comes first. In a folder the newest checkpoint is used; with --series two
folders are compared step by step, at the steps of which both have a checkpoint.

examples:
  adaptive-loss-scale diff output/checkpoint/rank_0 other/checkpoint/rank_0
  adaptive-loss-scale diff run_64/checkpoint/rank_0 run_512/checkpoint/rank_0 --series --plot parting.png
  adaptive-loss-scale diff npu.safetensors gpu.safetensors --modules model.layers.0 --worst 10
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable

from mindformers_adaptive.cli.output import UsageError, add_output_arguments, integer, print_result
from mindformers_adaptive.gradients.difference import (
    ArrayDifference,
    by_group,
    compare_arrays,
    difference_table,
    parting,
    series_table,
)
from mindformers_adaptive.gradients.groups import parameter_group
from mindformers_adaptive.gradients.selection import group_of_modules
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.differences import draw_differences

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("first", metavar="FILE", help="a .ckpt or .safetensors file, or a folder of them")
    parser.add_argument("reference", metavar="REFERENCE", help="a file or folder of the same kind, to compare with")
    parser.add_argument(
        "--modules", nargs="+", default=[], metavar="MODULE", help="show only these modules or Parameters, or *"
    )
    parser.add_argument("--worst", type=integer(1), metavar="N", help="show the N worst only; default: all")
    parser.add_argument("--series", action="store_true", help="compare two folders of checkpoints step by step")
    add_output_arguments(parser, "with --series: draw the error of each group over the steps")


def run(options: argparse.Namespace) -> None:
    """Read both, and print the errors."""
    if options.plot and not options.series:
        raise UsageError("argument --plot is for --series, which compares two folders of checkpoints")
    if options.series:
        _run_series(options)
        return
    with contextlib.redirect_stdout(sys.stderr):
        from mindformers_adaptive.mindformers.checkpoint_arrays import read_arrays

        (first, step), (reference, reference_step) = read_arrays(options.first), read_arrays(options.reference)
    if options.modules:
        group = group_of_modules(options.modules, list(dict.fromkeys([*first, *reference])))
        first, reference = ({name: one[name] for name in one if group(name)} for one in (first, reference))
    found = compare_arrays(first, reference)
    only = {options.first: sorted(first.keys() - reference), options.reference: sorted(reference.keys() - first)}

    def text() -> str:
        same = sum(one.relative_error == 0 for one in found)
        lines = [difference_table(found[: options.worst]), "", f"{same} of {len(found)} Parameters are equal."]
        if step != reference_step and None not in (step, reference_step):
            lines.append(f"The steps differ: {step} and {reference_step}.")
        lines += [f"Only in {path}: {len(names)}, such as {names[0]}." for path, names in only.items() if names]
        return "\n".join(lines)

    def content() -> dict[str, object]:
        steps = {"step": step, "reference_step": reference_step}
        return {**steps, "parameters": [one._asdict() for one in found], "only_in": only}

    print_result(options, content, text)


def _run_series(options: argparse.Namespace) -> None:
    """Compare the checkpoints of the steps that both folders have, and print or draw the errors."""
    if options.worst:
        raise UsageError("argument --worst is for two checkpoints, without --series")
    with contextlib.redirect_stdout(sys.stderr):
        from mindformers_adaptive.mindformers.checkpoint_arrays import by_step, read_arrays

        first, reference = by_step(options.first), by_step(options.reference)
        shared = sorted(first.keys() & reference.keys())
        if not shared:
            raise ValueError(
                f"The two folders must have checkpoints of the same steps, but {options.first} has "
                f"{', '.join(map(str, first)) or 'none'} and {options.reference} {', '.join(map(str, reference))}."
            )
        series: dict[int, list[ArrayDifference]] = {}
        group: Callable[[str], str | None] = parameter_group
        for step in shared:
            one, other = (read_arrays(folder[step])[0] for folder in (first, reference))
            if options.modules:
                group = group_of_modules(options.modules, list(dict.fromkeys([*one, *other])))
                one, other = ({name: each[name] for name in each if group(name)} for each in (one, other))
            series[step] = compare_arrays(one, other)
    left = len(first) + len(reference) - 2 * len(shared)
    rest = f"\n{left} checkpoint(s) are of steps that only one folder has." if left else ""

    def content() -> dict[str, object]:
        steps = {step: [one._asdict() for one in found] for step, found in series.items()}
        return {"steps": shared, "relative_error": by_group(series, group), "parameters": steps}

    print_result(options, content, lambda: f"{series_table(series, group)}\n\n{parting(series)}{rest}")
    if options.plot:
        save(draw_differences(series, group), options.plot)

"""Compare two checkpoints, or the gradients that `find --gradients` wrote on two devices: the error of each Parameter.

The second file is the reference. The relative error is the norm of the difference, as a multiple of the norm of the
reference; the worst Parameter comes first. Of two folders, each step is compared that both have, with its worst
Parameter, and the step from which the two drift apart: the first whose error is at least ten times the median of the
steps before. If there are no two such steps, the newest checkpoint of a folder is used. The output folder of a training
stands for its checkpoints.

examples:
  adaptive-loss-scale diff output/checkpoint/rank_0 other/checkpoint/rank_0
  adaptive-loss-scale diff npu.safetensors gpu.safetensors --modules model.layers.0 --worst 10
"""

import argparse
import contextlib
import math
import sys

from mindformers_adaptive.cli.output import add_output_arguments, integer, print_result
from mindformers_adaptive.gradients.difference import (
    DRIFT,
    ArrayDifference,
    compare_arrays,
    difference_table,
    drift_step,
    median_error,
    step_table,
)
from mindformers_adaptive.gradients.selection import group_of_modules
from mindformers_adaptive.mindformers.checkpoint_reader import Checkpoint

# The headings of the tables are short, because names of Parameters are long.
_LEGEND = """\
Relative: the norm of the difference, divided by the norm of the reference. Largest: of one element.
Equal: Parameters without a difference."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``diff``."""
    parser.add_argument("first", metavar="FILE", help="a .ckpt or .safetensors file, or a folder of them")
    parser.add_argument("reference", metavar="REFERENCE", help="a file or folder of the same kind, to compare with")
    parser.add_argument(
        "--modules", nargs="+", default=[], metavar="MODULE", help="show only these modules or Parameters, or *"
    )
    parser.add_argument(
        "--worst",
        type=integer(1),
        metavar="N",
        help="show only the N worst; default: all, or 1 for each step of two folders",
    )
    add_output_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """Print for each Parameter how far the first checkpoint differs from the reference, or for each step of folders."""
    with contextlib.redirect_stdout(sys.stderr):
        from mindformers_adaptive.mindformers.checkpoint_arrays import find_checkpoints

        first, reference = find_checkpoints(options.first), find_checkpoints(options.reference)
    steps, reference_steps = _by_step(first), _by_step(reference)
    shared = [step for step in steps if step in reference_steps]
    if len(shared) > 1:
        _print_steps(options, steps, reference_steps, shared)
    elif shared:
        _print_pair(options, steps[shared[0]], reference_steps[shared[0]])
    else:
        _print_pair(options, first[-1], reference[-1])


def _by_step(checkpoints: list[Checkpoint]) -> dict[int, Checkpoint]:
    """Return the checkpoints by step. If several ranks saved a step, take the lowest rank."""
    known: dict[int, Checkpoint] = {}
    for checkpoint in checkpoints:
        if checkpoint.step is not None:
            known.setdefault(checkpoint.step, checkpoint)
    return known


def _compare(
    options: argparse.Namespace, first: Checkpoint, reference: Checkpoint
) -> tuple[list[ArrayDifference], dict[str, list[str]]]:
    """Return the differences of two checkpoints, and the names of the Parameters that only one of them has."""
    with contextlib.redirect_stdout(sys.stderr):
        from mindformers_adaptive.mindformers.checkpoint_arrays import read_arrays

        pair = [read_arrays(checkpoint) for checkpoint in (first, reference)]
    if options.modules:
        group = group_of_modules(options.modules, list(dict.fromkeys([*pair[0], *pair[1]])))
        pair = [{name: arrays[name] for name in arrays if group(name)} for arrays in pair]
    names, reference_names = (set(arrays) for arrays in pair)
    only = {options.first: sorted(names - reference_names), options.reference: sorted(reference_names - names)}
    return compare_arrays(*pair), only


def _print_pair(options: argparse.Namespace, first: Checkpoint, reference: Checkpoint) -> None:
    differences, only = _compare(options, first, reference)

    def text() -> str:
        lines = [_verdict_of_pair(differences), "", difference_table(differences[: options.worst]), "", _LEGEND]
        if first.step != reference.step and None not in (first.step, reference.step):
            lines.append(f"The steps differ: {first.step} and {reference.step}.")
        return "\n".join([*lines, *_only_in(only)])

    def content() -> dict[str, object]:
        steps = {"step": first.step, "reference_step": reference.step}
        return {**steps, "parameters": [difference._asdict() for difference in differences], "only_in": only}

    print_result(options, content, text)


def _print_steps(
    options: argparse.Namespace, first: dict[int, Checkpoint], reference: dict[int, Checkpoint], shared: list[int]
) -> None:
    compared = {step: _compare(options, first[step], reference[step]) for step in shared}
    steps = {step: differences for step, (differences, _) in compared.items()}
    drift = drift_step({step: differences[0].relative_error for step, differences in steps.items()})
    only = compared[shared[-1]][1]

    def text() -> str:
        lines = [_verdict(steps, drift), "", step_table(steps, options.worst or 1), "", _LEGEND]
        for path, known in ((options.first, first), (options.reference, reference)):
            if single := known.keys() - shared:
                lines.append(f"Steps only in {path}: {', '.join(map(str, sorted(single)))}.")
        return "\n".join([*lines, *_only_in(only)]).rstrip()

    def content() -> dict[str, object]:
        rows = [
            {"step": step, "parameters": [difference._asdict() for difference in differences]}
            for step, differences in steps.items()
        ]
        return {"drift_step": drift, "steps": rows, "only_in": only}

    print_result(options, content, text)


def _verdict_of_pair(differences: list[ArrayDifference]) -> str:
    worst, count = differences[0], len(differences)
    equal = sum(difference.relative_error == 0 for difference in differences)
    if equal == count:
        return f"All {count} Parameters are equal."
    if math.isnan(worst.relative_error):
        return f"{worst.name} has inf or NaN in a file. {count - equal} of {count} Parameters differ."
    return (
        f"{count - equal} of {count} Parameters differ. The largest relative error is {worst.relative_error:.2e}, in "
        f"{worst.name}."
    )


def _verdict(steps: dict[int, list[ArrayDifference]], drift: int | None) -> str:
    if drift is not None:
        worst = steps[drift][0]
        usual = median_error([differences[0].relative_error for step, differences in steps.items() if step < drift])
        return (
            f"The two drift apart from step {drift:,}. The relative error of {worst.name} is then "
            f"{worst.relative_error:.2e}. Its median in the steps before is {usual:.2e}."
        )
    if not any(difference.relative_error for differences in steps.values() for difference in differences):
        return f"The two are equal at all {len(steps)} steps."
    return f"The two do not drift apart: no step of {len(steps)} has {DRIFT:g} times the error of the steps before."


def _only_in(only: dict[str, list[str]]) -> list[str]:
    return [f"Only in {path}: {len(names)}, such as {names[0]}." for path, names in only.items() if names]

"""Show the loss-scale state of the newest checkpoint in a file or folder.

PATH is a .ckpt or .safetensors file, a folder of them, a folder with rank_0, rank_1, ..., a folder iteration_N of
MindFormers' `checkpoint:` format, the folder above it, or the output folder of a training. The exit code is 1 if no
checkpoint there has a state.

examples:
  adaptive-loss-scale inspect output
  adaptive-loss-scale inspect output/checkpoint --rule log_max.LogMaxRule
"""

import argparse
import math
from collections.abc import Iterator
from typing import Any

from mindformers_adaptive.cli.output import add_output_arguments, print_result, read_source, wrong_usage
from mindformers_adaptive.mindformers.checkpoint_reader import newest_state
from mindformers_adaptive.rules import find_rule
from mindformers_adaptive.text.table import as_power_of_two, counted

# The meanings of the numbers in every state, and of the fields of a rule.
COUNTERS = {
    "loss_scale": "of the next step",
    "step_num": "the step at which the checkpoint was saved",
    "global_step": "steps that the optimizer applied",
    "cur_iter": "number of the next step, from 1",
    "last_overflow_iter": "the step of the last overflow or raise, 0 without one",
    "skipped_steps": "since the start of the training",
    "consecutive_overflows": "skipped steps in a row, up to the last step",
}
OF_ADAPTIVE = {
    "scale_window": "steps without overflow before a raise",
    "window_index": "which of the rule's windows, from 0 for the smallest; -1 is a window of 1 step",
    "growth_num": "raises that count toward the next larger window",
    "down_num": "drops that count toward a window of 1 step",
    "hysteresis_budget": "overflows until the next drop",
}
OF_GUIDED = {
    "low": "16 * log2 of the lowest recent ceiling; 16384 before the first one",
    "current_margin": "bits that the loss scale stays below this ceiling",
    "first_exponent": "log2 of the loss scale before the present overflows in a row",
    "clean_steps": "steps since the last unexplained overflow",
    "wait": "clean steps until such an overflow widens the margin; -1 before a ceiling",
    "largest_gradient": "of the last step, after its division by the loss scale",
}
_OF_RULE = {"adaptive": OF_ADAPTIVE, "guided": OF_GUIDED}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``inspect``."""
    parser.add_argument("path", type=read_source, metavar="PATH", help="the checkpoint file or folder")
    parser.add_argument(
        "--rule",
        "--policy",
        dest="rules",
        action="append",
        default=[],
        metavar="MODULE.CLASS",
        help="a rule of your own whose state may be there, such as log_max.LogMaxRule; may be given several times",
    )
    add_output_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """Print the loss-scale state of the newest checkpoint."""
    with wrong_usage("argument --rule: "):
        rules = [find_rule(name) for name in options.rules]
    state = newest_state(options.path, rules)
    state["notes"] += _unsound(state)
    print_result(options, lambda: state, lambda: _text(state))


def _unsound(state: dict[str, Any]) -> Iterator[str]:
    """Yield a note for each number that no training can have saved."""
    for name, value in state.items():
        if name == "loss_scale" and value is not None and not 0 < value < math.inf:
            yield f"loss_scale is {value:g}, but must be finite and above 0"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{name} is {value:g}, but must be finite"
        elif name in COUNTERS | OF_ADAPTIVE and isinstance(value, int) and value < (least := -(name == "window_index")):
            yield f"{name} is {value}, but must not be below {least}"


def _summary(state: dict[str, Any]) -> str:
    """Return a sentence that says where the training goes on from: the step, the loss scale, the skipped steps."""
    if list(_unsound(state)):
        return "This state is not sound, see the notes. Give another checkpoint."
    scale, following, skipped = state.get("loss_scale"), state.get("cur_iter"), state.get("skipped_steps")
    at = "an unknown loss scale" if scale is None else f"loss scale {as_power_of_two(scale)}"
    goes_on = f"The training goes on {f'with step {following}' if following else 'from here'} at {at}."
    were = "was" if skipped == 1 else "were"
    return goes_on if skipped is None else f"{goes_on} {counted(skipped, 'step')} {were} skipped so far."


def _text(state: dict[str, Any]) -> str:
    """Return a summary, and a line for each number in the loss-scale state and for each note.

    Only ``--json`` prints vectors.
    """
    values = {name: value for name, value in state.items() if value is not None and not isinstance(value, list)}
    lines = {name: f"{name}: {_number(value) if isinstance(value, float) else value}" for name, value in values.items()}
    # Rules of a user may have fields of the same names with other meanings.
    meanings = COUNTERS | _OF_RULE.get(state["kind"].partition(" ")[0], {})
    width = max((len(line) for name, line in lines.items() if name in meanings), default=0)
    commented = [f"{line:<{width}}  # {meanings[name]}" if name in meanings else line for name, line in lines.items()]
    return "\n".join([_summary(state), "", *commented, *(f"note: {note}" for note in state["notes"])])


def _number(value: float) -> str:
    # Write whole numbers below 1e16 without an exponent, so that powers of two are easy to recognise.
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e16 else f"{value:.9g}"

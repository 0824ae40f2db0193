"""Translate Megatron-LM's loss-scaling arguments into a ``scale_sense`` section of a YAML file."""

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.checks import (
    LARGEST_INT32,
    require_integer,
    require_number,
    require_positive,
    warn_of_rounding,
)
from mindformers_adaptive.text.nearest import did_you_mean

# An unknown argument counts as a misspelling if it is at least this similar to a loss-scaling argument of Megatron-LM.
# Megatron-LM's other arguments are less similar to the loss-scaling arguments.
_MISSPELLED = 0.85


def scale_sense_from_megatron(arguments: str | Sequence[str]) -> dict[str, Any]:
    """Return the YAML section ``scale_sense`` for the same loss scaling as a Megatron-LM command line.

    =========================== ============ ==========================================================
    Megatron-LM                 default      ``scale_sense``
    =========================== ============ ==========================================================
    ``--loss-scale S``          0            ``FixedLossScaleUpdateCell``: ``loss_scale_value`` S
    ``--fp16`` without it                    ``AdaptiveLossScale``: the rows below
    ``--initial-loss-scale S``  2**32        ``loss_scale_value`` S
    ``--min-loss-scale S``      1.0          ``min_loss_scale`` S
    ``--loss-scale-window N``   1000         ``scale_window``, ``max_scale_window``, ``min_scale_window`` N
    ``--hysteresis N``          2            ``hysteresis`` N
    ``--growth-factor F``       2.0          ``scale_factor`` F
    ``--backoff-factor F``      0.5          ``backoff_factor`` F, where it is not 1 / ``--growth-factor``
    neither of the first two                 ``NoLossScaleUpdateCell``: no scaling, no skipped steps
    =========================== ============ ==========================================================

    The two factors are no arguments of Megatron-LM, which gives them to its ``DynamicGradScaler`` in its code: name
    them where you have changed them there. It reads ``--loss-scale`` only with ``--fp16``, ``--bf16`` or
    ``--use-distributed-optimizer``.

    Args:
        arguments (Union[str, Sequence[str]]): a Megatron-LM command line, or its words. All other arguments are left
            alone.

    Returns:
        dict, to be put under ``runner_wrapper.scale_sense`` of a YAML file; without ``type``, the arguments of the
        class that ``type`` names.

    Raises:
        ValueError: if an argument has no value that Megatron-LM would take, or looks like a misspelling of one above.

    Warns:
        UserWarning: if ``--loss-scale`` or ``--initial-loss-scale`` is not a power of two.

    Examples:
        >>> section = scale_sense_from_megatron("--fp16 --initial-loss-scale 65536 --loss-scale-window 500 --lr 1e-4")
        >>> section["loss_scale_value"], section["max_scale_window"], section["hysteresis"]
        (65536.0, 500, 2)
        >>> scale_sense_from_megatron("--bf16 --loss-scale 1024")
        {'type': 'FixedLossScaleUpdateCell', 'loss_scale_value': 1024.0}
    """
    options = _parse(shlex.split(arguments) if isinstance(arguments, str) else list(arguments))
    if options.fp16 and options.bf16:
        raise ValueError("'--fp16' and '--bf16' must not be given together: Megatron-LM refuses that. Leave one out.")
    # Check these arguments also where the training does not use them.
    moving = _moving_scale(options)
    # As in Megatron-LM, a --loss-scale of 0 means no fixed scale, and FP32 training has no gradient scaler.
    fixed = require_positive("--loss-scale", options.loss_scale) if options.loss_scale else None
    warn_of_rounding("--loss-scale", fixed, stacklevel=2, least=1.0)
    if fixed is not None and (options.fp16 or options.bf16 or options.use_distributed_optimizer):
        return {"type": "FixedLossScaleUpdateCell", "loss_scale_value": fixed}
    if not options.fp16:
        return {"type": "NoLossScaleUpdateCell"}
    initial, minimum = moving["loss_scale_value"], moving["min_loss_scale"]
    if minimum > initial:
        raise ValueError(
            f"'--min-loss-scale' must not be above '--initial-loss-scale', but got {minimum} and {initial}. Lower the "
            "first or raise the second."
        )
    warn_of_rounding("--initial-loss-scale", initial, stacklevel=2)
    return moving


def _moving_scale(options: argparse.Namespace) -> dict[str, Any]:
    """Return the section for a scale that moves, or raise an error for an argument out of its range."""
    initial = require_positive("--initial-loss-scale", options.initial_loss_scale)
    minimum = require_positive("--min-loss-scale", options.min_loss_scale)
    window = options.loss_scale_window
    if not 1 <= window <= LARGEST_INT32 or not window.is_integer():
        raise ValueError(
            f"'--loss-scale-window' must be a whole number of steps, at least 1 and at most {LARGEST_INT32}, but got "
            f"{window}. With another number Megatron-LM itself never raises the scale."
        )
    require_integer("--hysteresis", options.hysteresis, 1, "Megatron-LM's default is 2.")
    wanted, remedy = "a finite number above 1", "Megatron-LM's is 2."
    growth = require_number("--growth-factor", options.growth_factor, wanted, lambda number: number > 1, remedy)
    wanted, remedy = "a number between 0 and 1", "Megatron-LM's is 0.5."
    backoff = require_number("--backoff-factor", options.backoff_factor, wanted, lambda number: 0 < number < 1, remedy)
    factors = {"scale_factor": growth, "backoff_factor": backoff}
    if backoff == 1 / growth:
        del factors["backoff_factor"]
    return {
        "type": AdaptiveRule.cell,
        "loss_scale_value": initial,
        **factors,
        "scale_window": int(window),
        "max_scale_window": int(window),
        "min_scale_window": int(window),
        "min_loss_scale": minimum,
        "hysteresis": options.hysteresis,
    }


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(f"Megatron-LM would refuse these arguments: {message}.")


def _parse(words: list[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for flag in ("--fp16", "--bf16", "--use-distributed-optimizer"):
        parser.add_argument(flag, action="store_true")
    # The loss-scaling arguments have the defaults of Megatron-LM's megatron/arguments.py.
    parser.add_argument("--loss-scale", type=float)
    parser.add_argument("--initial-loss-scale", type=float, default=2.0**32)
    parser.add_argument("--min-loss-scale", type=float, default=1.0)
    parser.add_argument("--loss-scale-window", type=float, default=1000.0)
    parser.add_argument("--hysteresis", type=int, default=2)
    # The growth and backoff factors have as defaults the values that Megatron-LM's get_megatron_optimizer() passes.
    parser.add_argument("--growth-factor", type=float, default=2.0)
    parser.add_argument("--backoff-factor", type=float, default=0.5)
    options, unknown = parser.parse_known_args(words)
    known = [option for action in parser._actions for option in action.option_strings]
    for option in (word.partition("=")[0] for word in unknown if word.startswith("--")):
        if question := did_you_mean(option, known, similarity=_MISSPELLED):
            raise ValueError(f"{option!r} is no argument of Megatron-LM. {question}Correct it or leave it out.")
    return options

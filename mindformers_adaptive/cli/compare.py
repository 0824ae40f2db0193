"""Replay rules of loss scaling on logs, and compare their skipped steps and how low their scales were.

The log must show each step: the record of LossScaleMonitor, or the log of Megatron-LM with --log-interval 1.

examples:
  adaptive-loss-scale compare output
  adaptive-loss-scale compare output --rules adaptive guided torch dynamic:scale_window=20
  adaptive-loss-scale compare run_64 run_512 --rules fixed:loss_scale=1024 torch:init_scale=2^20
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mindformers_adaptive.cli.output import (
    UsageError,
    add_output_arguments,
    add_pattern_argument,
    print_result,
    print_text,
    progress_bar,
    read_source,
    read_value,
    wrong_usage,
)
from mindformers_adaptive.lab.advise import other_cause
from mindformers_adaptive.lab.ceilings import from_gradient_ranges, trace_of
from mindformers_adaptive.lab.replay import compare, replay
from mindformers_adaptive.lab.running_rule import RULE_NAMES, RunningRule, start_argument, start_rule
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.lab import draw_comparison, draw_replays
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.run_folder import record_in
from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules import RULES, find_rule, is_rule_name
from mindformers_adaptive.rules.description import all_arguments
from mindformers_adaptive.rules.formats import FLOAT16, Format
from mindformers_adaptive.text.files import json_object, refuse_pipe
from mindformers_adaptive.text.table import counted

# Rules to compare by default: the adaptive rule, dynamic loss scaling with usual windows, and the loss scaling of
# Megatron-LM and PyTorch with default values.
_DEFAULT_RULES = [
    "adaptive",
    "dynamic:scale_window=20",
    "dynamic:scale_window=100",
    "dynamic:scale_window=1000",
    "dynamic:scale_window=2000",
    "megatron",
    "torch",
]

# By default, rules that follow the largest gradients are compared only if all traces have them.
_WITH_GRADIENTS = [name for name, rule in RULES.items() if rule.needs_gradients]

# Where no run says where it started, all rules start here, the default of MindFormers and of PyTorch.
_START = 2.0**16


@dataclass(frozen=True)
class _Source:
    """A trace to replay rules on, and the recorded run, if any, from which the trace was made."""

    trace: Trace
    run: RecordedRun | None = None

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, the source of the trace, and how much is known of its ceilings and gradients."""
        gradients = self.trace.largest_gradient
        return {
            "trace": self.trace.name,
            "steps": len(self.trace),
            "known_share": 1.0 if self.run is None else self.run.known_share,
            "gradients_known": 0.0 if gradients is None else float((~np.isnan(gradients)).mean()),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``compare``."""
    parser.add_argument(
        "traces",
        nargs="+",
        type=read_source,
        metavar="LOG",
        help="a training log with a line for each step, a record of LossScaleMonitor, the output folder of a run, or "
        "a record of GradientRangeMonitor with loss_scales",
    )
    add_pattern_argument(parser)
    parser.add_argument(
        "--rules",
        "--policies",
        dest="rules",
        nargs="+",
        metavar="RULE",
        help=f"NAME or NAME:PARAMETER=VALUE,...; default: {' '.join(_DEFAULT_RULES)}, and "
        f"{', '.join(_WITH_GRADIENTS)} where all traces have largest gradients, all from one loss scale; all names: "
        f"{', '.join(RULE_NAMES)}, or module.Class, a rule of your own. A rule without a start in its parameters "
        "starts where the run did, and takes the format of the run's gradients",
    )
    parser.add_argument("--each-trace", action="store_true", help="show each trace, not only the means of several")
    add_output_arguments(parser, "draw ceiling, scales and skips, or skips and bits below the ceiling, to a file")


def run(options: argparse.Namespace) -> None:
    """Replay the rules on the traces, and print the table that compares them."""
    for text in options.rules or ():
        # Refuse a wrong rule before the logs are read, which takes some time.
        _rule_maker(text, _START, FLOAT16)
    sources = _read_sources(options)
    traces = [source.trace for source in sources]
    measured = [trace for trace in traces if trace.largest_gradient is not None]
    formats = {trace.gradient_format.name: trace.gradient_format for trace in measured}
    if len(formats) > 1:
        raise UsageError(f"the gradients of these runs are in {' and '.join(formats)}: compare each format by itself")
    rules = options.rules or _DEFAULT_RULES + _WITH_GRADIENTS * (len(measured) == len(traces))
    start, gradient_format = _start_of(sources), next(iter(formats.values()), FLOAT16)
    makers = dict(_rule_maker(text, start, gradient_format) for text in rules)
    _warn_of_gradients(traces, rules)
    with progress_bar(len(makers) * len(traces), "replaying") as progress:
        comparison = compare(makers, traces, progress=progress)
    content = {"rows": comparison.rows()}
    _print(options, sources, content, comparison.text(options.each_trace))
    if options.plot and len(traces) == 1:
        replays = {label: replay(make(), traces[0]) for label, make in makers.items()}
        save(draw_replays(traces[0], replays), options.plot)
    elif options.plot:
        save(draw_comparison(comparison), options.plot)


def _start_of(sources: list[_Source]) -> float:
    """Return the loss scale at which all rules start: the first one of the only recorded run, or else 2^16."""
    run = sources[0].run if len(sources) == 1 else None
    scale = np.empty(0) if run is None else run.stated_scales
    usable = scale[(scale >= 1.0) & (scale <= 2.0**64)]
    first = None if run is None else run.first_loss_scales
    if first is not None and first[0] >= 1.0:
        return min(first[1], 2.0**64)
    return float(usable[0]) if len(usable) else _START


def _rule_maker(text: str, start: float, gradient_format: Format) -> tuple[str, Callable[[], RunningRule]]:
    """Return a rule's label and a function that makes it, from ``NAME`` or ``NAME:PARAMETER=VALUE,PARAMETER=VALUE``.

    A rule of which the text does not give the start begins at the scale ``start``, and one that takes the format of
    the gradients takes ``gradient_format``.

    Raises:
        UsageError: if there is no such rule, or it cannot take these parameters.

    Examples:
        >>> label, make = _rule_maker("dynamic:scale_window=20,init_loss_scale=2^16", 8.0, FLOAT16)
        >>> label, make().loss_scale
        ('dynamic:scale_window=20,init_loss_scale=2^16', 65536.0)
    """
    name, _, listed = text.partition(":")
    parameters: dict[str, Any] = {}
    for pair in filter(None, listed.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"A rule's parameter must have the form NAME=VALUE, but got {pair!r} in {text!r}.")
        if (key := key.strip()) in parameters:
            raise UsageError(f"A rule's parameter must be given once, but {key!r} has two values in {text!r}.")
        with wrong_usage(f"{pair!r}: "):
            parameters[key] = read_value(value)
    with wrong_usage(f"{text!r}: "):
        start_rule(name, **parameters)
        argument = start_argument(name)
        if name != "fixed" and not {argument, "loss_scale_value"} & parameters.keys():
            power = 2.0 ** math.floor(math.log2(start))
            parameters[argument] = power if is_rule_name(name) and name != "adaptive" else start
        if is_rule_name(name) and "gradient_format" in all_arguments(find_rule(name)):
            parameters.setdefault("gradient_format", gradient_format)
        start_rule(name, **parameters)
    return text, partial(start_rule, name, **parameters)


def _read_sources(options: argparse.Namespace) -> list[_Source]:
    if any(word.partition(":")[0] == "synthetic" and not Path(word).exists() for word in options.traces):
        raise UsageError("made-up runs are no longer in the program: give a log or a record of a training")
    return [_read_file(record_in(word), options) for word in options.traces]


def _read_file(path: Path, options: argparse.Namespace) -> _Source:
    refuse_pipe(path)
    if path.suffix == ".jsonl" and _holds_sweeps(path):
        return _Source(from_gradient_ranges(path))
    run = read_log(path, pattern=options.pattern)
    return _Source(trace_of(run), run)


def _holds_sweeps(path: Path) -> bool:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        return "batches" in json_object(lines.readline().strip())


def _warn_of_gradients(traces: list[Trace], labels: Iterable[str]) -> None:
    """Warn on stderr if a rule lacks the gradients it needs."""
    for name in filter(is_rule_name, dict.fromkeys(label.partition(":")[0] for label in labels)):
        rule = find_rule(name)
        for trace in traces if rule.needs_gradients else ():
            if trace.largest_gradient is None:
                print_text(
                    f"{trace.name} has no largest gradients, so rule {name!r} sees only overflows. A record of a "
                    f"training with {rule.cell} has them.",
                    file=sys.stderr,
                )


def _print(options: argparse.Namespace, sources: list[_Source], content: dict[str, Any], text: str) -> None:
    """Print the comparison, after causes outside loss scaling and before what could not be read."""
    runs = [source.run for source in sources if source.run is not None]
    causes, unread = [], []
    for run in runs:
        analysis = f"adaptive-loss-scale analyze {run.files[0]}"
        if (cause := other_cause(run)) is not None:
            causes.append(f"{run.name}: {cause.reason}\nWhat to do: {analysis}\n")
        if run.problems:
            unread.append(f"{counted(len(run.problems), 'line')} of {run.name} could not be read: {analysis} --details")
    print_result(
        options,
        lambda: {"sources": [source.describe() for source in sources], **content},
        lambda: "\n".join([*causes, text, *unread]),
    )

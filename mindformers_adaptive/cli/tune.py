"""Find the settings of a rule of loss scaling that would have cost least, and print the YAML to paste.

examples:
  adaptive-loss-scale tune output/log/rank_0/info.log
  adaptive-loss-scale tune --rule both --grid margin=4,6,8 output/loss_scale_record.jsonl
  adaptive-loss-scale tune my_logs/ --rows 10 --grid hysteresis=1,2,4 --grid max_scale_window=200,500,1000
"""

from __future__ import annotations

import argparse
from collections import Counter

from mindformers_adaptive.cli.lab_arguments import add_trace_arguments, print_sources, read_sources
from mindformers_adaptive.cli.output import (
    UsageError,
    add_output_arguments,
    add_python_argument,
    integer,
    progress_bar,
    read_value,
    wrong_usage,
)
from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.lab.configuration import Configuration, default_grid, grid
from mindformers_adaptive.lab.measures import FREE_BITS
from mindformers_adaptive.lab.tuning import tune
from mindformers_adaptive.record.run import ASSUMPTIONS
from mindformers_adaptive.record.scale_summary import bounded_share
from mindformers_adaptive.record.thresholds import DECIDED_FROM
from mindformers_adaptive.rules import RULES, find_rule
from mindformers_adaptive.rules.description import all_arguments

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``tune``."""
    add_trace_arguments(parser)
    parser.add_argument(
        "--rule",
        "--policy",
        dest="policy",
        metavar="NAME",
        help=f"whose settings to try: {', '.join(map(repr, RULES))}, 'both' in one table, or 'module.Class', a rule of "
        "your own; default: 'both' for logs with the largest gradients, otherwise 'adaptive'",
    )
    parser.add_argument("--exchange-rate", type=_refused_rate, help=argparse.SUPPRESS)
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="ARGUMENT=VALUE,VALUE",
        help="values of an argument of the cell to try, instead of the default ones; may be given several times",
    )
    parser.add_argument(
        "--rows", type=integer(1), metavar="N", help="list the N best settings too; default: the best only"
    )
    add_python_argument(parser)
    add_output_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """Search for the settings of a loss-scaling rule that cost least, and print the best settings."""
    policies = list(RULES) if options.policy == "both" else [options.policy or "adaptive"]
    tried = [_read_tried(text) for text in options.grid]
    twice = [name for name, count in Counter(name for name, _ in tried).items() if count > 1]
    if twice:
        raise UsageError(
            f"'--grid' must name each argument once, but {twice[0]!r} is given twice. Give all its values in one list."
        )
    sources = read_sources(options, policies)
    # The formats of the gradients that the logs have; None for a log without gradients and for a made-up trace.
    formats = {
        source.trace.gradient_format if source.run is not None and source.trace.largest_gradient is not None else None
        for source in sources
    }
    if options.policy is None and len(formats) == 1 and (of_logs := formats.pop()) is not None:
        policies, tried = list(RULES), [("gradient_format", [of_logs.to_config()]), *tried]
    configurations = _configurations(policies, dict(tried))
    runs = [source.run for source in sources if source.run is not None]
    assumptions = {
        name: [source.trace if source.run is None else source.run.to_trace(name) for source in sources]
        for name in ASSUMPTIONS
        if any(name in run.assumptions and name != (options.ceilings or run.assumptions[0]) for run in runs)
    }
    advised = None
    if len(sources) == len(runs) == 1 and bounded_share(sources[0].trace) >= DECIDED_FROM:
        advised = analyze(runs[0]).settings
    # Try the settings of 'analyze' too, so that both commands print the same settings if none cost less.
    if advised is not None and "adaptive" in policies and not tried and advised not in configurations:
        configurations.append(advised)
    recorded = [measures for source in sources if (measures := source.recorded) is not None]
    in_python = options.python
    if in_python is None:
        in_python = len(runs) == len(sources) and all(run.is_from_program for run in runs)
    with progress_bar(len(sources) * (1 + len(assumptions)), "sweeping") as progress:
        tuning = tune(
            [source.trace for source in sources],
            configurations,
            assumptions=assumptions,
            recorded=recorded if len(recorded) == len(sources) else (),
            runs=runs,
            advised=advised,
            in_python=in_python,
            progress=progress,
        )
    content: dict[str, object] = {"rows": tuning.rows(options.rows or 10), "certainty": tuning.certainty()}
    content |= {"scale_sense": tuning.settings_to_paste, "update_cell": tuning.update_cell}
    print_sources(options, sources, content, tuning.text(options.rows or 10 * options.details))


def _configurations(policies: list[str], tried: dict[str, list[object]]) -> list[Configuration]:
    """Return all combinations of arguments for each policy. An argument is tried only with policies that accept it."""
    with wrong_usage():
        known = {name: all_arguments(find_rule(name)) for name in policies}
        # If no policy has an argument of this name, pass it to every policy all the same: grid() then raises the error.
        common = tried.keys() - {key for arguments in known.values() for key in arguments}
        configurations: list[Configuration] = []
        for name, arguments in known.items():
            tried_arguments = {key: values for key, values in tried.items() if key in arguments or key in common}
            configurations += grid(name, **{**default_grid(name), **tried_arguments})
    return configurations


def _refused_rate(_: str) -> None:
    raise argparse.ArgumentTypeError(
        f"bits have no price any more: they are free down to {FREE_BITS} below the ceiling, and a step that is lower "
        "counts as skipped. Leave the option out"
    )


def _read_tried(text: str) -> tuple[str, list[object]]:
    name, equals, listed = text.partition("=")
    if not equals or not listed:
        raise UsageError(f"'--grid' must have the form ARGUMENT=VALUE,VALUE, but got {text!r}.")
    with wrong_usage(f"argument --grid: {name!r}: "):
        values = [read_value(value) for value in listed.split(",")]
    twice = [value for index, value in enumerate(values) if value in values[:index]]
    if twice:
        raise UsageError(f"'--grid' must list each value of {name!r} once, but {twice[0]!r} is listed twice.")
    return name.strip(), values

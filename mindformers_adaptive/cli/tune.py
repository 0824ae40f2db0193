"""Find the windows, factor and hysteresis that would have cost least on traces, and print the YAML to paste."""

from __future__ import annotations

import argparse

from mindformers_adaptive.cli.lab_arguments import add_trace_arguments, print_sources, read_sources
from mindformers_adaptive.cli.output import UsageError, add_json_argument, progress_bar, read_value
from mindformers_adaptive.lab.replay.configuration import grid
from mindformers_adaptive.lab.replay.measures import DEFAULT_EXCHANGE_RATE
from mindformers_adaptive.lab.replay.tune import DEFAULT_GRID, tune
from mindformers_adaptive.lab.traces.recorded_run import ASSUMPTIONS

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
examples:
  adaptive-loss-scale tune output/log/rank_0/info.log
  adaptive-loss-scale tune my_logs/ --exchange-rate 0.2 --try hysteresis=1,2,4 --try max_scale_window=200,500,1000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_trace_arguments(parser)
    parser.add_argument(
        "--exchange-rate",
        type=float,
        default=DEFAULT_EXCHANGE_RATE,
        help="how many skipped steps in 1000 a bit of headroom over the run is worth; default: "
        f"{DEFAULT_EXCHANGE_RATE:g}, what a window of 1000 pays to try the next bit",
    )
    parser.add_argument(
        "--try",
        dest="tried",
        action="append",
        default=[],
        metavar="ARGUMENT=VALUE,VALUE",
        help="values of an argument of the cell to try, in place of the default ones; may be given several times",
    )
    parser.add_argument("--rows", type=int, default=10, help="how many configurations to show; default: 10")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Search, and print the best settings."""
    try:
        configurations = grid(**{**DEFAULT_GRID, **dict(_read_tried(text) for text in options.tried)})
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    sources = read_sources(options)
    runs = [source.run for source in sources if source.run is not None]
    assumptions = {
        name: [source.trace if source.run is None else source.run.to_trace(name) for source in sources]
        for name in ASSUMPTIONS
        if any(name in run.assumptions and name != (options.assume or run.assumptions[0]) for run in runs)
    }
    with progress_bar(len(sources) * (1 + len(assumptions)), "sweeping") as progress:
        tuning = tune(
            [source.trace for source in sources],
            configurations,
            exchange_rate=options.exchange_rate,
            assumptions=assumptions,
            progress=progress,
        )
    content = {"rows": tuning.rows(options.rows), "certainty": tuning.certainty()}
    content["scale_sense"] = tuning.recommended.scale_sense()
    print_sources(options, sources, content, tuning.text(options.rows))


def _read_tried(text: str) -> tuple[str, list[object]]:
    name, equals, listed = text.partition("=")
    if not equals or not listed:
        raise UsageError(f"'--try' must have the form ARGUMENT=VALUE,VALUE, but got {text!r}.")
    return name.strip(), [read_value(value) for value in listed.split(",")]

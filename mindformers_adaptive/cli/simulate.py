"""Replay one policy on a trace: the steps that it would have skipped, and its headroom.

examples:
  adaptive-loss-scale simulate --policy adaptive:loss_scale_value=2^20,max_scale_window=500 output/log/rank_0/info.log
  adaptive-loss-scale simulate --policy dynamic:scale_window=500 output/loss_scale_record.jsonl --plot dynamic.png
  adaptive-loss-scale simulate --policy torch "synthetic:sudden drop" --plot torch.png
"""

from __future__ import annotations

import argparse
from typing import Any

from mindformers_adaptive.cli.lab_arguments import Source, add_trace_arguments, policy_maker, read_sources
from mindformers_adaptive.cli.output import add_output_arguments, print_result, progress_bar
from mindformers_adaptive.lab.policies import POLICY_NAMES
from mindformers_adaptive.lab.replay.simulate import replay
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.lab import draw_replays

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--policy",
        default="adaptive",
        metavar="NAME[:PARAMETER=VALUE,...]",
        help=f"one of {', '.join(POLICY_NAMES)}, with its own system's parameters, as "
        "metaseq:init_scale=2^16,scale_window=100, or module.Class, a rule of your own; default: adaptive",
    )
    add_trace_arguments(parser, several=False)
    add_output_arguments(parser, "draw ceiling, scale and skipped steps to this PNG or SVG file")


def run(options: argparse.Namespace) -> None:
    """Replay the policy on each trace, and print its measures."""
    label, make = policy_maker(options.policy)
    sources = read_sources(options, [label])
    if options.plot and len(sources) > 1:
        raise ValueError(f"'--plot' draws one trace, but got {len(sources)}. Name one of them.")
    rows: list[dict[str, Any]] = []
    with progress_bar(len(sources), "replaying") as progress:
        for source in sources:
            found = replay(make(), source.trace)
            told = {"measures": found.measures.as_dict(), "final_state": found.final_state}
            rows.append({"policy": label, "source": source.describe(), **told})
            progress(len(rows))
    print_result(options, lambda: rows, lambda: "\n".join(map(_text, sources, rows)))
    if options.plot:
        # There is one trace only.
        save(draw_replays(source.trace, {label: found}), options.plot)


def _text(source: Source, row: dict[str, Any]) -> str:
    values = {**row["measures"], **row["final_state"]}
    return "\n".join([source.text(), *(f"  {name:<24}{_cell(value)}" for name, value in values.items())])


def _cell(value: object) -> str:
    if value is None:
        return "unknown"
    return f"{value:g}" if isinstance(value, float) else str(value)

"""Replay rules of loss scaling on logs, and compare their skipped steps and how low their scales were.

examples:
  adaptive-loss-scale compare output/log/rank_0/info.log
  adaptive-loss-scale compare synthetic --rules adaptive torch megatron dynamic:scale_window=20
  adaptive-loss-scale compare synthetic --rules fixed:loss_scale=1024 torch:init_scale=2^20
"""

from __future__ import annotations

import argparse
import math
from functools import partial

from mindformers_adaptive.cli.lab_arguments import (
    Source,
    add_trace_arguments,
    policy_maker,
    print_sources,
    read_sources,
)
from mindformers_adaptive.cli.output import add_output_arguments, progress_bar
from mindformers_adaptive.lab.policies import POLICY_NAMES, make_policy
from mindformers_adaptive.lab.replay import compare, replay
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.lab import draw_comparison, draw_replays
from mindformers_adaptive.rules import RULES

__all__ = ["add_arguments", "run"]

# Policies to compare by default: the adaptive rule, dynamic loss scaling with usual windows, and the loss scaling of
# Megatron-LM and PyTorch with default values.
_DEFAULT_POLICIES = [
    "adaptive",
    "dynamic:scale_window=20",
    "dynamic:scale_window=100",
    "dynamic:scale_window=1000",
    "dynamic:scale_window=2000",
    "megatron",
    "torch",
]

# Loss-scaling rules that follow the largest gradients. By default, compare these rules only if all traces have largest
# gradients.
_WITH_GRADIENTS = [name for name, rule in RULES.items() if rule.needs_gradients]


# The argument of each default policy that holds the loss scale to start from.
_START_NAMES = {"adaptive": "loss_scale_value", "dynamic": "init_loss_scale", "megatron": "initial_scale"}
_START_NAMES |= {"torch": "init_scale", **dict.fromkeys(_WITH_GRADIENTS, "loss_scale_value")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``compare``."""
    add_trace_arguments(parser)
    parser.add_argument(
        "--rules",
        "--policies",
        dest="policies",
        nargs="+",
        metavar="NAME[:PARAMETER=VALUE,...]",
        help=f"default: {' '.join(_DEFAULT_POLICIES)}, and {', '.join(_WITH_GRADIENTS)} where all traces have largest "
        f"gradients; all names: {', '.join(POLICY_NAMES)}, or module.Class, a rule of your own",
    )
    parser.add_argument("--each-trace", action="store_true", help="show each trace, not only the means of several")
    add_output_arguments(parser, "draw ceiling, scales and skips, or skips and bits below the ceiling, to a file")


def run(options: argparse.Namespace) -> None:
    """Replay the rules on the traces, and print the table that compares them."""
    makers = dict(policy_maker(text) for text in options.policies or _DEFAULT_POLICIES)
    sources = read_sources(options, makers)
    if not options.policies and all(source.trace.largest_gradient is not None for source in sources):
        formats = {source.trace.gradient_format for source in sources}
        if len(formats) == 1:
            makers |= {name: partial(make_policy, name, gradient_format=formats.pop()) for name in _WITH_GRADIENTS}
    if not options.policies and (start := _start_of(sources)):
        # Rules that start at different scales would differ first of all in what each start costs.
        # Only the rules that follow the gradients need a power of two.
        power = 2.0 ** math.floor(math.log2(start))
        makers = {
            name: partial(make, **{_START_NAMES[name.partition(":")[0]]: power if name in _WITH_GRADIENTS else start})
            for name, make in makers.items()
        }
    traces = [source.trace for source in sources]
    with progress_bar(len(makers) * len(traces), "replaying") as progress:
        comparison = compare(makers, traces, progress=progress)
    content = {"rows": comparison.rows(), "pareto_front": comparison.pareto_front()}
    print_sources(options, sources, content, comparison.text(options.each_trace, options.details))
    if options.plot and len(traces) == 1:
        replays = {label: replay(make(), traces[0]) for label, make in makers.items()}
        save(draw_replays(traces[0], replays), options.plot)
    elif options.plot:
        save(draw_comparison(comparison), options.plot)


def _start_of(sources: list[Source]) -> float | None:
    """Return the loss scale at which the only recorded run started; None without a run, or with several traces."""
    run = sources[0].run if len(sources) == 1 else None
    if run is None:
        return None
    scale = run.filled_loss_scale
    usable = scale[(scale >= 1.0) & (scale <= 2.0**64)]
    return float(usable[0]) if len(usable) else None

"""Measure what one update of the loss scale costs: MindSpore's, MindFormers' and this package's update cells.

    python scripts/bench_update_cell.py
    python scripts/bench_update_cell.py --mode PyNative --rounds 20 --calls 20

Each cell is compiled ``--copies`` times. The copies of all cells take turns: in every round each makes ``--calls``
updates in a row. Other programs only ever add time, so a copy's time is that of its fastest round; a cell's is the
median over its copies, and its cost is that time above a call that does nothing. Machines differ and are noisy, so
compare the ratio of two costs from one run, not the microseconds.
"""

import argparse
import contextlib
import gc
import json
import math
import statistics
import sys
import time
from pathlib import Path

from argument_types import positive

from mindformers_adaptive.text.atomic_file import atomic_write

ARGUMENTS = {"loss_scale_value": 2**16, "scale_factor": 2, "scale_window": 20}
# With a window of 20 clean steps, one overflow in 25 steps keeps every scale within float32, the stock cells' too.
STEPS_PER_OVERFLOW = 25

EMPTY = "empty"
OURS = "ours"
HISTORY = "ours_history"
GUIDED_HISTORY = "guided_history"
MINDFORMERS = "mindformers_adaptive"
LABELS = {
    EMPTY: "empty call",
    "mindspore_dynamic": "MindSpore's DynamicLossScaleUpdateCell",
    MINDFORMERS: "MindFormers' AdaptiveLossScaleUpdateCell",
    OURS: "AdaptiveLossScaleUpdateCell",
    "ours_hysteresis": "AdaptiveLossScaleUpdateCell, hysteresis=2",
    HISTORY: "AdaptiveLossScaleUpdateCell, history_size=100",
    "guided": "GradientGuidedLossScaleUpdateCell",
    GUIDED_HISTORY: "GradientGuidedLossScaleUpdateCell, history_size=100",
}


def main():
    arguments = parse_arguments()
    # MindFormers logs to standard output, which belongs to the result.
    with contextlib.redirect_stdout(sys.stderr):
        result = measure(arguments.mode, arguments.copies, arguments.rounds, arguments.calls, arguments.cells)
    text = json.dumps(result, indent=2) + "\n"
    if arguments.json == "-":
        print(as_table(result), file=sys.stderr)
        sys.stdout.write(text)
        return
    print(as_table(result))
    if arguments.json is not None:
        with atomic_write(arguments.json) as file:
            file.write(text)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="The costs of two cells are only comparable within one run."
    )
    parser.add_argument("--mode", choices=("graph", "PyNative"), default="graph", help="MindSpore's (default: graph)")
    parser.add_argument("--copies", type=positive, default=5, help="times that a cell is compiled (default: 5)")
    parser.add_argument("--rounds", type=positive, default=100, help="rounds, the fastest counts (default: 100)")
    parser.add_argument("--calls", type=positive, default=100, help="updates a cell makes in a round (default: 100)")
    parser.add_argument(
        "--cells",
        nargs="+",
        choices=LABELS,
        default=list(LABELS),
        metavar="NAME",
        help=f"of {', '.join(LABELS)} (default: all); the first and {MINDFORMERS} are always measured",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the result as JSON, all of it or nothing; '-' is standard output, and the table then goes to "
        "standard error",
    )
    arguments = parser.parse_args()
    if arguments.json not in (None, "-"):
        file = Path(arguments.json)
        if not file.parent.is_dir():
            parser.error(f"argument --json: there is no folder {str(file.parent)!r}")
        if file.exists() and not file.is_file():
            parser.error(f"argument --json: {arguments.json!r} is there and is no regular file")
    return arguments


def measure(mode, copies, rounds, calls, names):
    """Measure cells.

    Args:
        mode (str): ``"graph"`` or ``"PyNative"``.
        copies (int): how many times each cell is compiled.
        rounds (int): the number of rounds.
        calls (int): the updates a copy makes in a round.
        names (Sequence[str]): which of ``LABELS``; the empty call and MindFormers' cell are measured in any case,
            because the others are compared with them.

    Returns:
        dict: ``mindspore``, ``mindformers`` (versions), ``device``, ``mode``, ``copies``, ``rounds``, ``calls`` and
        ``cells``, which has for each cell by name its ``kernels`` (of its graph; None if unknown), ``microseconds`` an
        update, ``above_empty`` in microseconds and the ``ratio`` of that to the same of MindFormers' cell.
    """
    import mindformers
    import mindspore
    from exported_graph import export_graph

    mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
    cells = build_cells({EMPTY, MINDFORMERS, *names}, copies)
    times = update_times(cells, rounds, calls)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    above_empty = {name: times[name] - times[EMPTY] for name in cells}
    return {
        "mindspore": mindspore.__version__,
        "mindformers": mindformers.__version__,
        "device": mindspore.get_context("device_target"),
        "mode": mode,
        "copies": copies,
        "rounds": rounds,
        "calls": calls,
        "cells": {
            name: {
                # MindSpore exports no graph with a history, whose Parameters are no cell's.
                "kernels": None
                if name in (HISTORY, GUIDED_HISTORY)
                else len(export_graph(of_a_kind[0], mindspore.Tensor(True)).kernels),
                "microseconds": times[name],
                "above_empty": above_empty[name],
                "ratio": above_empty[name] / above_empty[MINDFORMERS],
            }
            for name, of_a_kind in cells.items()
        },
    }


def build_cells(names, copies=1):
    """Return lists of ``copies`` cells by name, in the order of ``LABELS``, each called with ``overflow`` only."""
    from exported_graph import LossScaleHolder
    from mindformers.wrapper.adaptive_loss_scale import AdaptiveLossScaleUpdateCell as MindFormersUpdateCell
    from mindformers_adaptive.cells.guided_update_cell import GradientGuidedLossScaleUpdateCell
    from mindspore import nn, ops

    from mindformers_adaptive.cells.update_cell import AdaptiveLossScaleUpdateCell

    class EmptyUpdateCell(nn.Cell):
        def __init__(self):
            super().__init__()
            self.logic_not = ops.LogicalNot()

        def construct(self, loss_scale, overflow):
            # One kernel, because MindSpore does not run a graph without any: that call would be too cheap.
            return self.logic_not(overflow)

    start = ARGUMENTS["loss_scale_value"]
    build = {
        EMPTY: EmptyUpdateCell,
        "mindspore_dynamic": lambda: nn.DynamicLossScaleUpdateCell(**ARGUMENTS),
        MINDFORMERS: lambda: MindFormersUpdateCell(**ARGUMENTS),
        OURS: lambda: AdaptiveLossScaleUpdateCell(**ARGUMENTS),
        "ours_hysteresis": lambda: AdaptiveLossScaleUpdateCell(**ARGUMENTS, hysteresis=2),
        HISTORY: lambda: AdaptiveLossScaleUpdateCell(**ARGUMENTS, history_size=100),
        "guided": lambda: GradientGuidedLossScaleUpdateCell(start),
        GUIDED_HISTORY: lambda: GradientGuidedLossScaleUpdateCell(start, history_size=100),
    }
    return {name: [LossScaleHolder(build[name](), start) for _ in range(copies)] for name in LABELS if name in names}


def update_times(cells, rounds, calls):
    """Return the time of one update by name, in microseconds: of each copy's fastest round, the median over copies."""
    from mindspore import Tensor

    clean, overflowed = Tensor(False), Tensor(True)
    flags = [overflowed if step % STEPS_PER_OVERFLOW == 0 else clean for step in range(calls)]
    turns = [(name, copy) for name, copies in cells.items() for copy in copies]
    for _, copy in turns:
        time_of_a_call(copy, flags)  # compiles the graph
    fastest = [math.inf] * len(turns)
    gc.collect()
    gc.disable()
    try:
        for count in range(rounds):
            for place in range(len(turns)):
                # The order is rotated, so that no cell always goes first.
                turn = (count + place) % len(turns)
                fastest[turn] = min(fastest[turn], time_of_a_call(turns[turn][1], flags))
    finally:
        gc.enable()
    return {
        name: statistics.median(time for (owner, _), time in zip(turns, fastest, strict=True) if owner == name)
        for name in cells
    }


def time_of_a_call(cell, flags):
    start = time.perf_counter()
    for flag in flags:
        output = cell(flag)
    # Wait for the device. In PyNative mode the flag comes back before the state is there.
    output.asnumpy()
    for parameter in cell.get_parameters():
        parameter.asnumpy()
    return (time.perf_counter() - start) / len(flags) * 1e6


def as_table(result):
    """Return the result as plain text."""
    lines = [
        "MindSpore {mindspore}, MindFormers {mindformers}, {device}, {mode} mode".format(**result),
        f"{result['copies']} copies of each cell, {result['rounds']} rounds of {result['calls']} updates",
        "",
        f"{'update cell':<51} {'ratio':>6} {'above empty':>12} {'update':>10} {'kernels':>8}",
    ]
    for name, cell in result["cells"].items():
        lines.append(
            f"{LABELS[name]:<51} {cell['ratio']:>6.2f} {cell['above_empty']:>9.1f} us {cell['microseconds']:>7.1f} us "
            f"{'unknown' if cell['kernels'] is None else cell['kernels']:>8}"
        )
    ours = f"; ours: {result['cells'][OURS]['ratio']:.2f}" if OURS in result["cells"] else ""
    return "\n".join([*lines, "", f"ratio: time above the empty call, MindFormers' cell = 1{ours}"])


if __name__ == "__main__":
    main()

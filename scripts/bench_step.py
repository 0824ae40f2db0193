"""Measure what loss scaling adds to a train step of the demo's model, in graph and PyNative mode.

    python scripts/bench_step.py

In every round each way of scaling takes one step, in random order, so that what else the machine does falls on all
of them. The extra cost of a way is the median over the rounds of its time against that of MindSpore's dynamic cell in
the same round, in percent of a step. Also where the time of a step goes, and what the overflow detection costs.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

from argument_types import positive

from mindformers_adaptive.text.atomic_file import atomic_write
from mindformers_adaptive.text.json_text import json_text

DYNAMIC, AGAIN = "MindSpore's dynamic", "MindSpore's dynamic, another time"
GRADIENTS = "adaptive, GradientRangeMonitor every 100 steps"
# Low enough for the adaptive cell to raise it for many rounds without an overflow, whose step would be shorter.
START, HISTORY, LOOK_EVERY = 2.0**6, 100, 100
NAMES = (
    "no scaling",
    "fixed",
    DYNAMIC,
    AGAIN,
    "MindFormers' adaptive",
    "adaptive",
    "adaptive, LossScaleMonitor",
    "adaptive, history_size=100",
    "guided",
)
# Update cells by their names in bench_update_cell.py; whole steps differ by more than these cost, so they are also
# measured alone.
UPDATES = {
    "mindspore_dynamic": DYNAMIC,
    "mindformers_adaptive": "MindFormers' adaptive",
    "ours": "adaptive",
    "guided": "guided",
}
QUICK_NAMES, QUICK_ROUNDS = (DYNAMIC, "adaptive"), 4


def main():
    arguments = parse_arguments()
    from worth_it import output_to_stderr

    with output_to_stderr():
        result = measure(arguments)
    print("\n".join(report(result)))
    if arguments.json is not None:
        with atomic_write(arguments.json) as file:
            file.write(json_text(result, indent=1) + "\n")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=200, help="steps of each way in graph mode (default: 200)")
    parser.add_argument("--pynative-rounds", type=positive, default=10, help="in PyNative mode (default: 10)")
    parser.add_argument("--seq-length", type=positive, default=128, help="bytes a sample (default: 128, the demo's)")
    parser.add_argument("--quick", action="store_true", help="few rounds, one layer: a test of this script")
    parser.add_argument("--json", metavar="FILE", help="also write the result to this file")
    arguments = parser.parse_args()
    if arguments.json is not None and not Path(arguments.json).absolute().parent.is_dir():
        parser.error(f"argument --json: there is no folder {str(Path(arguments.json).parent)!r}")
    return arguments


def measure(arguments):
    """Return all times, in milliseconds, as JSON can hold them."""
    import mindformers
    import mindspore
    from bench_detection import COUNTS, ELEMENTS, measure_detection
    from bench_update_cell import measure as measure_updates
    from worth_llama import Llama

    task = Llama(steps=10_000, seq_length=arguments.seq_length)
    names, rounds, tensors, elements = NAMES, arguments.rounds, COUNTS, ELEMENTS
    rounds_by_mode = {"graph": rounds, "PyNative": arguments.pynative_rounds}
    if arguments.quick:
        names, rounds, tensors, elements = QUICK_NAMES, QUICK_ROUNDS, COUNTS[:1], 20_000
        rounds_by_mode = {"graph": rounds}
        task.model["num_layers"] = 1
    modes = {}
    for mode, count in rounds_by_mode.items():
        mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
        print(f"{mode} mode", file=sys.stderr, flush=True)
        modes[mode] = steps_in_turns(task, names, count)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    print("parts of a step, and the detection", file=sys.stderr, flush=True)
    return {
        "mindspore": mindspore.__version__,
        "mindformers": mindformers.__version__,
        "seq_length": task.model["seq_length"],
        "modes": modes,
        "parts": parts_of_a_step(task, max(3, rounds // 5)),
        "updates": measure_updates(rounds, 100, list(UPDATES))["cells"],
        "elements": elements,
        "detection": measure_detection(max(3, rounds // 10), elements, tensors),
    }


def steps_in_turns(task, names, rounds):
    """Return by way of scaling the times of its steps, and of GRADIENTS those of its looks, in milliseconds."""
    import numpy as np
    from mindspore import dtype as mstype

    network = task.network(mstype.float16, 0)
    batch = task.data(0).batch
    with tempfile.TemporaryDirectory() as folder:
        ways = {name: step_function(task, network, name, folder) for name in names}
        look = look_function(task, network, folder)
        for way in (*ways.values(), *ways.values(), look):
            way(batch(0))  # compiles, and reaches all memory once
        taken, order = {name: [] for name in ways}, np.random.default_rng(0)
        gc.collect()
        gc.disable()
        try:
            for count in range(rounds):
                for name in order.permutation(names):
                    taken[name].append(milliseconds(ways[name], batch(count)))
            taken[GRADIENTS] = [milliseconds(look, batch(count)) for count in range(max(2, rounds // 20))]
        finally:
            gc.enable()
    return taken


def milliseconds(call, batch):
    start = time.perf_counter()
    call(batch)
    return (time.perf_counter() - start) * 1e3


def update_cell(name):
    from mindformers.wrapper.adaptive_loss_scale import AdaptiveLossScaleUpdateCell as MindFormersUpdateCell
    from mindspore import nn

    from mindformers_adaptive import wrapper

    cells = {
        "no scaling": wrapper.NoLossScaleUpdateCell,
        "fixed": lambda: nn.FixedLossScaleUpdateCell(START),
        DYNAMIC: lambda: nn.DynamicLossScaleUpdateCell(START, 2, 20),
        "MindFormers' adaptive": lambda: MindFormersUpdateCell(START, 2, 20),
        "adaptive, history_size=100": lambda: wrapper.AdaptiveLossScaleUpdateCell(START, 2, 20, history_size=HISTORY),
        "guided": lambda: wrapper.GradientGuidedLossScaleUpdateCell(START),
    }
    cells[AGAIN] = cells[DYNAMIC]
    return cells.get(name, lambda: wrapper.AdaptiveLossScaleUpdateCell(START, 2, 20))()


def step_function(task, network, name, folder):
    """Return a function that takes a train step and waits for its loss, and for its callback, if it has one."""
    train_step = task.train_step(network, update_cell(name))
    if "LossScaleMonitor" not in name:
        return lambda batch: train_step(*batch)[0].asnumpy()
    from mindformers_adaptive import LossScaleMonitor

    monitor, context = begun(LossScaleMonitor(Path(folder, "record.jsonl")), train_step)
    params = context.original_args()

    def step(batch):
        params.net_outputs = train_step(*batch)
        params.cur_step_num += 1
        monitor.on_train_step_end(context)
        params.net_outputs[0].asnumpy()

    return step


def look_function(task, network, folder):
    """Return a function that has GradientRangeMonitor measure a batch."""
    from mindformers_adaptive import GradientRangeMonitor

    train_step = task.train_step(network, update_cell("adaptive"))
    monitor, context = begun(GradientRangeMonitor(1, record_path=Path(folder, "ranges.jsonl")), train_step)
    params = context.original_args()

    def look(batch):
        params.cur_step_num += 1
        params.train_dataset_element = batch
        monitor.on_train_step_begin(context)

    return look


def begun(callback, train_step):
    """Return a callback whose training has begun, and MindSpore's context of that training."""
    from mindspore.train.callback import RunContext
    from mindspore.train.model import _InternalCallbackParam

    params = _InternalCallbackParam()
    params.train_network = params.network = train_step
    params.cur_step_num, params.cur_epoch_num, params.batch_num = 0, 1, 10**6
    params.dataset_sink_mode, params.list_callback = False, [callback]
    context = RunContext(params)
    callback.on_train_begin(context)
    return callback, context


def parts_of_a_step(task, rounds):
    """Return the shortest times of parts of a step in graph mode, in milliseconds."""
    from mindspore import Tensor
    from mindspore import dtype as mstype

    from mindformers_adaptive.gradients.backward import backward_pass

    network = task.network(mstype.float16, 0)
    backward, scale = backward_pass(network), Tensor(START, mstype.float32)
    step = step_function(task, network, DYNAMIC, None)
    calls = {
        "forward": lambda batch: network(*batch).asnumpy(),
        "forward and backward": lambda batch: backward(scale, *batch)[1][0].asnumpy(),
        "whole step, dynamic": step,
    }
    batch = task.data(0).batch
    for call in calls.values():
        call(batch(0))
    taken = {name: [] for name in calls}
    for count in range(rounds):
        for name, call in calls.items():
            taken[name].append(milliseconds(call, batch(count)))
    return {name: min(each) for name, each in taken.items()}


def extra_percent(taken, name):
    """Return how much longer a way's steps take than the dynamic cell's: median and standard error, in percent."""
    if name == GRADIENTS:
        share = statistics.median(taken[name]) / LOOK_EVERY / statistics.median(taken[DYNAMIC])
        others = extra_percent(taken, "adaptive")
        return others[0] + 100.0 * share, others[1]
    extra = [100.0 * (one / dynamic - 1.0) for one, dynamic in zip(taken[name], taken[DYNAMIC], strict=True)]
    # The standard error of a median, from the quartiles; 1.349 of them are a standard deviation.
    if len(extra) < 4:
        return statistics.median(extra), float("nan")
    low, _, high = statistics.quantiles(extra, n=4)
    return statistics.median(extra), 1.253 * (high - low) / 1.349 / len(extra) ** 0.5


def report(result):
    """The report, as lines of Markdown."""
    from bench_detection import detection_table

    rounds = {mode: len(taken[DYNAMIC]) for mode, taken in result["modes"].items()}
    yield f"MindSpore {result['mindspore']}, MindFormers {result['mindformers']}, CPU; the demo's model, samples of"
    yield f"{result['seq_length']} bytes. Extra cost of a step against {DYNAMIC} cell, in percent of that step: median"
    counts = " and ".join(f"{count} in {mode} mode" for mode, count in rounds.items())
    yield f"of paired steps ± its standard error, of {counts}:"
    yield ""
    yield "| way of scaling | " + " | ".join(f"{mode} mode" for mode in rounds) + " |"
    yield "|" + "---|" * (len(rounds) + 1)
    for name in next(iter(result["modes"].values())):
        cells = []
        for taken in result["modes"].values():
            extra, error = extra_percent(taken, name)
            cells.append("0" if name == DYNAMIC else f"{extra:+.1f} ± {error:.1f}")
        yield f"| {name} | " + " | ".join(cells) + " |"
    whole = result["parts"]["whole step, dynamic"]
    yield ""
    yield "Where the time of a step goes in graph mode, as a share of the whole step:"
    yield ""
    yield "| part | share |"
    yield "|---|---|"
    before = 0.0
    for name, taken in result["parts"].items():
        label = {"forward and backward": "backward", "whole step, dynamic": "detection, clipping, optimizer, scaling"}
        yield f"| {label.get(name, name)} | {(taken - before) / whole:.0%} |"
        before = taken
    yield ""
    yield f"An update alone, in a graph of its own, above one of {DYNAMIC} cell, as a share of the whole step:"
    yield ""
    yield "| update cell | share |"
    yield "|---|---|"
    for name, share in update_shares(result).items():
        yield f"| {name} | {share:.2%} |"
    yield ""
    yield from detection_table(result["detection"], result["elements"])


def update_shares(result):
    """Return what an update takes above one of the dynamic cell, as a share of the whole step, by way of scaling."""
    taken = {label: result["updates"][name]["microseconds"] / 1e3 for name, label in UPDATES.items()}
    whole = result["parts"]["whole step, dynamic"]
    return {label: (time - taken[DYNAMIC]) / whole for label, time in taken.items() if label != DYNAMIC}


if __name__ == "__main__":
    main()

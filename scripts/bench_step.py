"""Measure what loss scaling adds to a train step of the demo's model, in graph and PyNative mode.

    python scripts/bench_step.py
    python scripts/bench_step.py --only adaptive --copies 12

Two compiled train steps may differ by some percent without their cells being the reason. So each way of scaling is
compiled several times, in random order. In every round each of these copies takes one step, in random order again, so
that what else the machine does falls on all of them. The extra cost of a way is that of its copies, on average, above
those of MindSpore's dynamic cell, in percent of a step; its standard error is that of their differences. Also where the
time of a step goes, and what the overflow detection costs.
"""

import argparse
import gc
import random
import sys
import tempfile
import time
from pathlib import Path

from argument_types import positive
from step_report import DYNAMIC, GRADIENTS, UPDATES, report

from mindformers_adaptive.text.atomic_file import atomic_write
from mindformers_adaptive.text.json_text import json_text

# Low enough for the adaptive cell to raise it for many rounds without an overflow, whose step would be shorter.
START, HISTORY = 2.0**6, 100
# Of each update cell alone, in a round.
UPDATE_CALLS = {"graph": 200, "PyNative": 10}
NAMES = (
    "no scaling",
    "fixed",
    DYNAMIC,
    "MindFormers' adaptive",
    "adaptive",
    "adaptive, LossScaleMonitor",
    "adaptive, history_size=100",
    "guided",
)
QUICK_NAMES, QUICK_COPIES, QUICK_ROUNDS = (DYNAMIC, "adaptive"), 1, 4


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
    parser.add_argument(
        "--copies", type=positive, default=4, help="train steps of each way; fewer need less memory (default: 4)"
    )
    parser.add_argument("--rounds", type=positive, default=50, help="steps of each copy in graph mode (default: 50)")
    parser.add_argument("--pynative-rounds", type=positive, default=5, help="in PyNative mode (default: 5)")
    parser.add_argument("--seq-length", type=positive, default=128, help="bytes a sample (default: 128, the demo's)")
    parser.add_argument(
        "--only",
        choices=[name for name in NAMES if name != DYNAMIC],
        metavar="NAME",
        help=f"compare only this way with {DYNAMIC} cell, in graph mode, and nothing else",
    )
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
    from bench_update_cell import build_cells, update_times
    from worth_llama import Llama

    task = Llama(steps=10_000, seq_length=arguments.seq_length)
    names, copies, rounds, tensors, elements = NAMES, arguments.copies, arguments.rounds, COUNTS, ELEMENTS
    rounds_by_mode = {"graph": rounds, "PyNative": arguments.pynative_rounds}
    if arguments.quick:
        names, copies, rounds, tensors, elements = QUICK_NAMES, QUICK_COPIES, QUICK_ROUNDS, COUNTS[:1], 20_000
        rounds_by_mode = {"graph": rounds}
        task.model["num_layers"] = 1
    if arguments.only is not None:
        names, rounds_by_mode = (DYNAMIC, arguments.only), {"graph": rounds}
    modes, updates = {}, {}
    for mode, count in rounds_by_mode.items():
        mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
        print(f"{mode} mode", file=sys.stderr, flush=True)
        modes[mode] = steps_in_turns(task, names, copies, count)
        if arguments.only is None:
            modes[mode][GRADIENTS] = [looks(task, count)]
            updates[mode] = update_times(build_cells(set(UPDATES), copies), count, UPDATE_CALLS[mode])
    result = {
        "mindspore": mindspore.__version__,
        "mindformers": mindformers.__version__,
        "seq_length": task.model["seq_length"],
        "modes": modes,
    }
    if arguments.only is not None:
        return result
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    print("parts of a step, and the detection", file=sys.stderr, flush=True)
    return result | {
        "parts": parts_of_a_step(task, max(3, rounds)),
        "updates": updates,
        "elements": elements,
        "detection": measure_detection(max(3, rounds // 2), elements, tensors),
    }


def steps_in_turns(task, names, copies, rounds):
    """Return by way of scaling the times of the steps of each copy, in milliseconds."""
    from mindspore import dtype as mstype

    network = task.network(mstype.float16, 0)
    batch = task.data(0).batch
    order = random.Random(0)
    taken = {name: [[] for _ in range(copies)] for name in names}
    in_order = [(name, times) for name, each in taken.items() for times in each]
    with tempfile.TemporaryDirectory() as folder:
        steps = [(step_function(task, network, name, folder), times) for name, times in shuffled(in_order, order)]
        for step, _ in (*steps, *steps):
            step(batch(0))  # compiles, and reaches all memory once
        gc.collect()
        gc.disable()
        try:
            for count in range(rounds):
                for step, times in shuffled(steps, order):
                    times.append(milliseconds(step, batch(count)))
        finally:
            gc.enable()
    return taken


def looks(task, rounds):
    """Return the times of measuring the gradients of a batch, in milliseconds."""
    from mindspore import dtype as mstype

    batch = task.data(0).batch
    with tempfile.TemporaryDirectory() as folder:
        look = look_function(task, task.network(mstype.float16, 0), folder)
        for _ in range(2):
            look(batch(0))
        return [milliseconds(look, batch(count)) for count in range(max(2, rounds // 5))]


def shuffled(items, order):
    return order.sample(items, len(items))


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
    return cells.get(name, lambda: wrapper.AdaptiveLossScaleUpdateCell(START, 2, 20))()


def step_function(task, network, name, folder):
    """Return a function that takes a train step and waits for its loss, and for its callback, if it has one."""
    train_step = task.train_step(network, update_cell(name))
    if "LossScaleMonitor" not in name:
        return lambda batch: train_step(*batch)[0].asnumpy()
    from mindformers_adaptive import LossScaleMonitor

    # The callback locks its record, so each has a folder of its own.
    folder = tempfile.mkdtemp(dir=folder)
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


if __name__ == "__main__":
    main()

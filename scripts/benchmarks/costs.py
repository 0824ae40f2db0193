"""Measure what loss scaling costs: an update of the loss scale, a train step, overflow detection.

    python -m scripts.benchmarks.costs update
    python -m scripts.benchmarks.costs step
    python -m scripts.benchmarks.costs detection

All are measured as paired_timing.py describes: several copies of each way run in turns, in random order. A figure
after ± is the standard error; in the extra time of a step, it is half of the 95 % confidence interval. Machines differ
and are noisy, so compare the ratios from one run, not the times.
"""

import argparse
import math
import sys
import tempfile
from functools import partial
from pathlib import Path

from scipy import stats

from scripts.benchmarks.paired_timing import compare, ratio, time_above, with_error
from scripts.benchmarks.update_cells import (
    ADAPTIVE,
    CELLS,
    DYNAMIC,
    EMPTY,
    GUIDED,
    HISTORY,
    MINDFORMERS,
    START,
    make_update_cell,
)
from scripts.studies.reporting import add_json_option, output_to_stderr, positive, versions, with_captions, write_json

# With a window of 20 clean steps, one overflow in 25 steps keeps the scales of all update cells within float32.
STEPS_PER_OVERFLOW = 25
# How often each copy of a way of scaling is timed. One takes some hundredths of a step.
SCALING_ROUNDS = 200

QUICK_CELLS = (EMPTY, MINDFORMERS, ADAPTIVE, HISTORY)

LOOK_EVERY = 100
MONITOR = "adaptive, LossScaleMonitor"
# The times under the name GRADIENTS are for one measurement by GradientRangeMonitor, not for a train step.
GRADIENTS = f"adaptive, GradientRangeMonitor every {LOOK_EVERY} steps"
SCALINGS = ("no scaling", "fixed", DYNAMIC, MINDFORMERS, ADAPTIVE, HISTORY, GUIDED)
QUICK_SCALINGS = (DYNAMIC, ADAPTIVE, GUIDED)
STEP, FORWARD, BACKWARD = "train step", "forward", "forward and backward"

PLAIN, ALL_FINITE, NUMPY = "ReduceMax alone", "amp.all_finite", "NumPy's pass"
DETECTIONS = {ADAPTIVE: "adaptive cell", GUIDED: "guided cell, with the largest gradient"}
TENSORS, ELEMENTS = (4, 50, 200), 5_000_000


def main():
    arguments = parse_arguments()
    if arguments.quick:
        arguments.copies, arguments.rounds = 1, 3
    # Keep the output of MindSpore and MindFormers out of the printed result.
    with output_to_stderr():
        sizes = {"copies": arguments.copies, "rounds": arguments.rounds}
        result = {"benchmark": arguments.command, **versions(), **sizes, **arguments.measure(arguments)}
    print("MindSpore {mindspore}, MindFormers {mindformers}, CPU".format(**result))
    print("\n".join(with_captions(tables(result), CAPTIONS)))
    write_json(arguments.json, result)
    sys.exit(1 if result.get("different_configurations") else 0)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    update = add_command(commands, measure_update, "one update of the loss scale, by each update cell", 5, 50)
    update.add_argument("--mode", choices=("graph", "PyNative"), default="graph", help="MindSpore's (default: graph)")
    update.add_argument("--calls", type=positive, default=100, help="updates a copy makes in a round (default: 100)")
    add_command(commands, measure_step, "a train step of the demo's model, in graph mode", 4, 20)
    add_command(commands, measure_detection, "what it takes to see an overflow in 5 million gradients", 4, 25)
    return parser.parse_args()


def add_command(commands, measure, about, copies, rounds):
    name = measure.__name__.removeprefix("measure_")
    command = commands.add_parser(name, help=about, description=f"Measure {about}.")
    command.set_defaults(measure=measure)
    about_copies = f"times each way is built; fewer need less memory (default: {copies})"
    command.add_argument("--copies", type=positive, default=copies, help=about_copies)
    command.add_argument("--rounds", type=positive, default=rounds, help=f"calls of each copy (default: {rounds})")
    command.add_argument("--quick", action="store_true", help="1 copy, 3 rounds, small sizes: a test of this script")
    add_json_option(command)
    return command


def set_mode(mode):
    import mindspore

    mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)


def tables(result):
    """Return the tables of a measurement, by name; each table is a list of rows with the header first."""
    return TABLES[result["benchmark"]](result)


# The command "update": measure the time of one update of the loss scale


def measure_update(arguments):
    """Return, for each update cell, the time of ``--calls`` updates and, if known, the number of kernels."""
    from scripts.benchmarks.kernels import WithLossScale, count_kernels

    set_mode(arguments.mode)
    calls = 5 if arguments.quick else arguments.calls
    ways = {name: partial(make_updates, name, calls) for name in (QUICK_CELLS if arguments.quick else CELLS)}
    times = compare(ways, arguments.copies, arguments.rounds)
    set_mode("graph")
    # MindSpore cannot export an update cell that keeps a history: the history's Parameters belong to no cell.
    kernels = {name: count_kernels(WithLossScale(make_update_cell(name))) for name in CELLS if "history" not in name}
    return {"mode": arguments.mode, "calls": calls, "times": times, "kernels": kernels}


def make_updates(name, calls):
    """Return a function that makes ``calls`` updates with a new update cell."""
    from mindspore import Tensor

    from scripts.benchmarks.kernels import WithLossScale

    cell = WithLossScale(make_update_cell(name))
    clean, overflowed = Tensor(False), Tensor(True)
    flags = [overflowed if step % STEPS_PER_OVERFLOW == 0 else clean for step in range(calls)]

    def update(_):
        for flag in flags:
            output = cell(flag)
        # Wait for the device. In PyNative mode, the overflow flag is returned before the new state is computed.
        output.asnumpy()
        for parameter in cell.get_parameters():
            parameter.asnumpy()

    return update


def update_tables(result):
    times = result["times"]
    rows = [["update cell", "ratio", "above an empty call", "one update", "kernels"]]
    for name in times:
        taken = (time_above(times, name, empty)[0] * 1e3 / result["calls"] for empty in (EMPTY, None))
        relative = with_error(*ratio(times, name, MINDFORMERS, EMPTY), 2)
        kernels = str(result["kernels"].get(name, "unknown"))
        rows.append([CELLS[name], relative, *(f"{each:.1f} µs" for each in taken), kernels])
    return {"cells": rows}


# The command "step": measure the time of a train step, and of what ways of scaling add to it


def measure_step(arguments):
    """Return the times of a train step, of its parts, and of scaling by each cell.

    Two train steps with the same cell may differ by more than two ways of scaling do. So what differs is measured on
    its own: detection, clipping and update, and the callbacks.
    """
    from scripts.studies.worth_tasks import SMALL_TASKS, Llama

    task = SMALL_TASKS["damped"] if arguments.quick else Llama(steps=10_000)
    scalings = {name: partial(make_scaling, task, name) for name in (QUICK_SCALINGS if arguments.quick else SCALINGS)}
    set_mode("graph")
    with tempfile.TemporaryDirectory() as folder:
        times = compare(ways_of_a_step(task, folder), arguments.copies, arguments.rounds)
    return {
        "task": f"{task.name}, {task.about}",
        "loss_scale": START,
        "times": times,
        "scalings": compare(scalings, arguments.copies, 3 if arguments.quick else SCALING_ROUNDS),
    }


def ways_of_a_step(task, folder):
    """Return, by name, functions that build what is timed: a train step, its parts, and the callbacks beside it."""
    from mindspore import Tensor
    from mindspore import dtype as mstype

    from mindformers_adaptive.gradients.backward import backward_pass

    network, batch = task.network(mstype.float16, 0), task.data(0).batch
    scale = Tensor(START, mstype.float32)

    def make_backward():
        backward = backward_pass(network)
        return lambda count: backward(scale, *batch(count))[1][0].asnumpy()

    def make_step():
        train_step = task.train_step(network, make_update_cell(DYNAMIC, held=True))
        return lambda count: train_step(*batch(count))[0].asnumpy()

    callbacks = {name: partial(make_callback, task, network, batch, name, folder) for name in (MONITOR, GRADIENTS)}
    forward = {FORWARD: lambda: lambda count: network(*batch(count)).asnumpy(), BACKWARD: make_backward}
    return {STEP: make_step, **callbacks, **forward}


def make_scaling(task, name):
    """Return a function that does what ``name`` adds to a train step: it detects overflow, clips and updates."""
    import mindspore
    import numpy as np
    from mindspore import Tensor, nn
    from mindspore import dtype as mstype

    class Scaling(nn.Cell):
        def __init__(self, train_step):
            super().__init__(auto_prefix=False)
            self.train_step, self.clips = train_step, getattr(train_step, "use_clip_grad", False)

        def construct(self, gradients):
            overflow = self.train_step.get_overflow_status(gradients[0], gradients)
            clipped = self.train_step.clip_grad_norm(gradients) if self.clips else gradients
            return self.train_step.process_loss_scale(overflow), clipped

    network, random = task.network(mstype.float16, 0), np.random.default_rng(0)
    shapes = [weight.shape for weight in network.trainable_params()]
    # Without mindspore.mutable(), MindSpore would compile the gradients into the graph as constants.
    gradients = mindspore.mutable(tuple(Tensor(random.normal(size=shape).astype(np.float32)) for shape in shapes))
    train_step = task.train_step(network, make_update_cell(name, held=True))
    scaling = Scaling(train_step)

    def scale(_):
        scaling(gradients)[0].asnumpy()
        if (loss_scale := train_step.scale_sense.asnumpy().item()) not in (1.0, START):
            raise RuntimeError(f"{name} set the loss scale to {loss_scale:g}, not {START:g}. Lower START in costs.py")

    return scale


def make_callback(task, network, batch, name, folder):
    """Return a function that calls a callback once, as MindSpore does in a training: a monitor, or a measurement."""
    from mindspore.train.callback import RunContext
    from mindspore.train.model import _InternalCallbackParam

    from mindformers_adaptive import GradientRangeMonitor, LossScaleMonitor

    train_step = task.train_step(network, make_update_cell(ADAPTIVE, held=True))
    # Each callback locks its record, so each record has a folder of its own.
    record = Path(tempfile.mkdtemp(dir=folder), "record.jsonl")
    callback = LossScaleMonitor(record) if name == MONITOR else GradientRangeMonitor(1, record_path=record)
    params = _InternalCallbackParam(train_network=train_step, network=train_step, list_callback=[callback])
    params.update(cur_step_num=0, cur_epoch_num=1, batch_num=10**6, dataset_sink_mode=False)
    params.net_outputs = train_step(*batch(0))
    context = RunContext(params)
    callback.on_train_begin(context)

    def call(count):
        params.cur_step_num += 1
        params.train_dataset_element = batch(count)
        (callback.on_train_step_end if name == MONITOR else callback.on_train_step_begin)(context)

    return call


def step_tables(result):
    times = result["times"]
    names = [*result["scalings"], MONITOR, GRADIENTS]
    forward, both = (ratio(times, name, STEP)[0] for name in (FORWARD, BACKWARD))
    parts = {FORWARD: forward, "backward": both - forward, "detection, clipping, optimizer, scaling": 1.0 - both}
    return {
        "extra": [["way of scaling", "extra time, percent"], *([name, extra_cost(result, name)] for name in names)],
        "parts": [["part", "share"], *([name, f"{share:.0%}"] for name, share in parts.items())],
    }


def extra_cost(result, name):
    """Return, as text, the extra time of a step with the cell ``name``, in percent of a step with the dynamic cell.

    After ± is half of the 95 % confidence interval, from Student's t for the differences between two sets of copies.
    """
    if name == DYNAMIC:
        return "0"
    times, scalings, callback = result["times"], result["scalings"], (0.0, 0.0)
    if name in (MONITOR, GRADIENTS):
        callback = [each / (LOOK_EVERY if name == GRADIENTS else 1) for each in time_above(times, name)]
        name = ADAPTIVE
    extra, error = time_above(scalings, name, DYNAMIC)
    step = time_above(times, STEP)[0] / 100.0
    percent = (extra + callback[0]) / step
    half = math.hypot(error, callback[1]) * stats.t.ppf(0.975, 2 * (result["copies"] - 1)) / step
    return ("+" if percent >= 0 else "") + with_error(percent, half, 2)


# The command "detection": measure the time of the overflow detection


def measure_detection(arguments):
    """Return how long the overflow detection takes, by the number of gradient Tensors."""
    set_mode("graph")
    elements, counts = (200_000, TENSORS[:1]) if arguments.quick else (ELEMENTS, TENSORS)
    times = {}
    for count in counts:
        times[count] = compare(ways_of_detection(count, elements // count), arguments.copies, arguments.rounds)
    return {"elements": elements, "times": times}


def ways_of_detection(count, size):
    """Return functions, by name, that build an overflow detection over ``count`` gradients of ``size`` elements."""
    import mindspore
    import numpy as np
    from mindspore import Tensor, amp, nn, ops

    from mindformers_adaptive.wrapper import TrainOneStepWithLossScaleCell

    class Pass(nn.Cell):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def construct(self, gradients):
            return self.function(gradients)

    class Detection(TrainOneStepWithLossScaleCell):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            # The random gradients count as divided by the loss scale.
            self.declare_divided_gradients()

        def construct(self, gradients):
            return self.get_overflow_status(None, gradients)

    def detection(name):
        network = nn.Dense(1, 1)
        return Detection(network, nn.SGD(network.trainable_params()), make_update_cell(name))

    def first_element(gradients):
        return ops.neg(gradients[0][0:1])

    def largest_values(gradients):
        # The baseline for the times of overflow detection: only one primitive, a maximum, for each gradient Tensor.
        return ops.stack([ops.ReduceMax()(gradient) for gradient in gradients])

    random = np.random.default_rng(0)
    arrays = [random.normal(size=size).astype(np.float32) for _ in range(count)]
    # Without mindspore.mutable(), MindSpore would compile the gradients into the graph as constants.
    gradients = mindspore.mutable(tuple(map(Tensor, arrays)))

    def compiled(make_cell, argument):
        cell = make_cell(argument)
        return lambda _: cell(gradients).asnumpy()

    functions = {EMPTY: first_element, PLAIN: largest_values, ALL_FINITE: amp.all_finite}
    ways = {name: partial(compiled, Pass, function) for name, function in functions.items()}
    ways |= {name: partial(compiled, detection, name) for name in DETECTIONS}
    return ways | {NUMPY: lambda: lambda _: [array.max() for array in arrays]}


def detection_tables(result):
    rows = [["Tensors", f"`{ALL_FINITE}`", *DETECTIONS.values(), NUMPY]]
    for count, times in result["times"].items():
        ratios = [ratio(times, name, PLAIN, EMPTY) for name in (ALL_FINITE, *DETECTIONS)]
        # NumPy's time has no MindSpore call in it, so do not subtract the time of an empty MindSpore call from it.
        plain, (numpy, error) = time_above(times, PLAIN, EMPTY)[0], times[NUMPY]
        ratios.append((numpy / plain, error / plain))
        rows.append([str(count), *(with_error(*each, 1) for each in ratios)])
    return {"passes": rows}


TABLES = {"update": update_tables, "step": step_tables, "detection": detection_tables}
CAPTIONS = {
    "cells": "An update; ratio: time above the empty call, MindFormers' cell = 1, ± its standard error:",
    "extra": f"Extra time of a step at 2^14 against {DYNAMIC} cell, in percent, ± its standard error:",
    "parts": "Where the time of a step goes in graph mode, as a share of the whole step:",
    "passes": f"Overflow detection as a multiple of a plain pass over the same bytes ({PLAIN}), ± its standard error:",
}


if __name__ == "__main__":
    main()

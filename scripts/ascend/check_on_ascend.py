"""Check on an Ascend what could not be checked without a device, and print a report that you can send.

    python -m scripts.ascend.check_on_ascend compile    # update cells and train steps, each compiled for the device
    python -m scripts.ascend.check_on_ascend steps      # 50 steps, compared with the rule in NumPy
    python -m scripts.ascend.check_on_ascend resume     # 25 steps, a checkpoint, and 25 more, compared with 50 in a row

A check needs MindSpore, MindFormers, this package and one device, and takes a few minutes. ``--device CPU`` runs the
same check on a CPU.
"""

import argparse
import os
import sys
import tempfile
import traceback
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindformers_adaptive.wrapper import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
)
from scripts.ascend.cases import ALONE, CASES, CONTROLS
from scripts.studies.reporting import table, versions

STEPS, START = 50, 2.0**20
# FP16 rounds this number and all larger numbers to inf.
OVERFLOWS_FROM = 65520.0
# The gradient of the loss with respect to each product of weight and input in the network `Sum`.
FACTOR = 2.0**-8

CELLS = {
    "adaptive": lambda: AdaptiveLossScaleUpdateCell(START, 2, 4, max_scale_window=8, min_scale_window=4),
    "adaptive, hysteresis=2": lambda: AdaptiveLossScaleUpdateCell(START, 2, 4, 8, 4, hysteresis=2),
    "guided": lambda: GradientGuidedLossScaleUpdateCell(START, margin=2),
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--device", default="Ascend", choices=("Ascend", "CPU"), help="(default: Ascend)")
    arguments = parser.parse_args()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device(arguments.device)
    print("\n".join(about(arguments)))
    rows = [[name, verdict(check)] for name, check in CHECKS[arguments.check]()]
    print("\n".join(table([[arguments.check, "result"], *rows])))
    sys.exit(0 if all(result == "as it should be" for _, result in rows) else 1)


def about(arguments):
    """Yield the lines of the report that name the versions and the device."""
    from mindspore._c_expression import MSContext

    named = {**versions(), "Python": sys.version.split()[0], "device": arguments.device}
    if arguments.device == "Ascend":
        named["chip"] = MSContext.get_instance().get_ascend_soc_version()
        named["CANN"] = os.path.realpath(os.environ.get("ASCEND_HOME_PATH", "unknown"))
    yield from (f"{name}: {value}" for name, value in named.items())
    yield ""


def verdict(check):
    """Run a check. Return "as it should be" or, in one line, the error, whose traceback goes to standard error."""
    try:
        check()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return "as it should be"


# The check "compile": update cells and train steps, each compiled for the device


def compile_checks():
    """Yield the small cases of compile_for_ascend.py that one process can compile."""
    from scripts.ascend import steps

    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
    for name, case in CASES.items():
        stock_on_cpu = name.endswith("/stock") and mindspore.get_context("device_target") == "CPU"
        # Here every case is compiled for the chip in this machine. So a case for the chip 910A would only repeat the
        # case for the chip 910B. Skip it.
        if case.is_large or case.world != ALONE or name in CONTROLS or "910A" in name or stock_on_cpu:
            continue
        yield name, lambda case=case: getattr(steps, case.function)(**case.arguments)


# The check "steps": 50 train steps, compared with the rule in NumPy


class Sum(nn.Cell):
    """A network that returns the sum of weight * x in FP16, times FACTOR. The gradient of each weight is FACTOR * x."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(16), mindspore.float32), name="weight")

    def construct(self, x):
        products = ops.cast(self.weight, mindspore.float16) * ops.cast(x, mindspore.float16)
        return ops.cast(products, mindspore.float32).sum() * FACTOR


def train_step(name):
    network = Sum()
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=1e-4, momentum=0.9)
    return TrainOneStepWithLossScaleCell(network, optimizer, CELLS[name]()).set_train()


def inputs():
    """Return the input for each step: powers of two, so that the largest loss scale without overflow varies."""
    walk = np.cumsum(np.random.default_rng(0).choice([-1, 0, 1], STEPS)) + 6 * (np.arange(STEPS) // 10 % 2)
    return [2.0 ** float(level) for level in np.clip(walk, -4, 8)]


def take(step, values):
    """Train one step on each input; return each step's overflow flag, next loss scale, state and first weight."""
    seen = []
    for value in values:
        overflow = bool(step(Tensor(np.full(16, value), mindspore.float32))[1])
        state = step.loss_scaling_manager.state()
        seen.append((overflow, float(step.scale_sense.asnumpy()), state, float(step.weights[0].asnumpy()[0])))
    return seen


def follow_the_rule(name):
    step = train_step(name)
    rule, state = step.loss_scaling_manager.rule, step.loss_scaling_manager.rule.start(START)
    overflows = 0
    for number, (value, seen) in enumerate(zip(inputs(), take(step, inputs()), strict=True), start=1):
        incoming = state.loss_scale * FACTOR
        overflow = max(incoming, incoming * value) >= OVERFLOWS_FROM
        overflows += overflow
        state = rule.step(state, overflow, np.inf if overflow else FACTOR * value)
        if (overflow, state.loss_scale) != seen[:2]:
            raise AssertionError(
                f"step {number}: the device computed overflow {seen[0]} and next loss scale {seen[1]}, but the rule in "
                f"NumPy computed overflow {overflow} and next loss scale {state.loss_scale}"
            )
    if not 1 <= overflows <= STEPS // 2:
        raise AssertionError(
            f"{overflows} of {STEPS} steps overflowed, but this check needs 1 to {STEPS // 2}. Change inputs()"
        )


def step_checks():
    return [(name, lambda name=name: follow_the_rule(name)) for name in CELLS]


# The check "resume": 25 train steps, a checkpoint, and 25 more steps, compared with 50 steps in a row


def resume(name):
    half = STEPS // 2
    first = train_step(name)
    take(first, inputs()[:half])
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "step.ckpt"))
        mindspore.save_checkpoint(first, file)
        second = train_step(name)
        mindspore.load_param_into_net(second, mindspore.load_checkpoint(file))
    # The first training continues without interruption.
    both = (take(step, inputs()[half:]) for step in (second, first))
    for number, (resumed, uninterrupted) in enumerate(zip(*both, strict=True), start=half + 1):
        if resumed != uninterrupted:
            raise AssertionError(
                f"step {number}: overflow, next loss scale, state and first weight are {resumed} in the resumed "
                f"training, but {uninterrupted} in the uninterrupted training"
            )


def resume_checks():
    return [(name, lambda name=name: resume(name)) for name in CELLS]


CHECKS = {"compile": compile_checks, "steps": step_checks, "resume": resume_checks}

if __name__ == "__main__":
    main()

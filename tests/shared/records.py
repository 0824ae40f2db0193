"""Lines of the records of runs and of gradients, and a check that a record is what the rule does."""

import json

import numpy as np

from mindformers_adaptive.gradients.report import GradientRanges, ScaleRanges, array_statistics
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.step import FIELDS

NAMES = ("layers.0.attention.wq.weight", "layers.1.attention.wo.weight", "lm_head.weight")
SIZE = 1000
REFERENCE = 512.0


def unscaled_gradients(step):
    random = np.random.default_rng(step)
    deviations = (2.0**-28, 2.0**-26, 2.0**-9)
    return {name: random.normal(0, deviation, SIZE) for name, deviation in zip(NAMES, deviations, strict=True)}


def in_fp16(step, scale):
    with np.errstate(over="ignore"):
        return {name: (gradients * scale).astype(np.float16) for name, gradients in unscaled_gradients(step).items()}


def gradient_line(step, scale, *scales):
    """A line of the monitor's record, as JSON holds it; scales below the reference count their underflows."""
    ranges = []
    for tried in sorted({scale, *scales}):
        gradients, at_reference = in_fp16(step, tried), in_fp16(step, REFERENCE)
        reference = at_reference if scales and tried <= REFERENCE else {}
        statistics = {name: array_statistics(gradients[name], reference.get(name), tried / REFERENCE) for name in NAMES}
        ranges.append(ScaleRanges(tried, 1.0, statistics))
    weights = {name: array_statistics([1.0]) for name in NAMES}
    return json.loads(json.dumps({"step": step, **GradientRanges(weights, (tuple(ranges),)).to_dict()}))


def record_of(scales, skipped=(), **values_by_name):
    """A record with the scale of each step and of that after the last; steps count from 1."""
    return [
        {"step": step, "loss": 5.0 - step / len(scales), "overflow": step in skipped, "scale_window": 20}
        | {"loss_scale": scales[step - 1], "next_loss_scale": scales[step]}
        | {name: values[step - 1] for name, values in values_by_name.items()}
        for step in range(1, len(scales))
    ]


def run_of(scale, overflow, known=True, first_step=1, **attributes):
    """A run as it is read from a log: the scale and the flag of each step, and whether their places are known."""
    step = np.arange(first_step, first_step + len(scale))
    scale, overflow = np.array(scale, np.float64), np.array(overflow, bool)
    return RecordedRun(
        "run", ("run.log",), "jsonl", step, scale, overflow, np.broadcast_to(known, len(step)), **attributes
    )


def assert_follows(rule, state, lines):
    """See that the lines are as the rule goes from this state on, in all that they know; return the last state."""
    for line in lines:
        assert line["loss_scale"] == state.loss_scale
        state = rule.step(state, line["overflow"], line.get("largest_gradient"))
        after = {"next_loss_scale": state.loss_scale, **state._asdict()}
        known = [field for field in FIELDS[4:10] if line.get(field) is not None]
        assert {field: line[field] for field in known} == {field: after[field] for field in known}
    return state


def missing(first, last):
    """The line of a record that stands for steps that nobody saw."""
    return {"missing_steps": last - first + 1, "first_step": first, "last_step": last}

"""Helpers that build records of runs and of gradients, and check that a loss-scaling rule reproduces a record."""

import json

import numpy as np

from mindformers_adaptive.gradients.report import GradientRanges, ScaleRanges
from mindformers_adaptive.gradients.statistics import array_statistics
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.step import COLUMNS, FIELDS

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
    """Return one step of a gradient record, as read from JSON.

    With ``scales``, the step also has counts of underflows, for all loss scales up to 512.
    """
    ranges = []
    for tried in sorted({scale, *scales}):
        gradients, at_reference = in_fp16(step, tried), in_fp16(step, REFERENCE)
        reference = at_reference if scales and tried <= REFERENCE else {}
        statistics = {name: array_statistics(gradients[name], reference.get(name), tried / REFERENCE) for name in NAMES}
        ranges.append(ScaleRanges(tried, 1.0, statistics))
    weights = {name: array_statistics([1.0]) for name in NAMES}
    return json.loads(json.dumps({"step": step, **GradientRanges(weights, (tuple(ranges),)).to_dict()}))


def record_of(scales, skipped=(), **values_by_name):
    """Return the record of a run from step 1 on; the last of ``scales`` is the loss scale after the last step."""
    return [
        {"step": step, "loss": 5.0 - step / len(scales), "overflow": step in skipped, "scale_window": 20}
        | {"loss_scale": scales[step - 1], "next_loss_scale": scales[step]}
        | {name: values[step - 1] for name, values in values_by_name.items()}
        for step in range(1, len(scales))
    ]


def run_of(scale, overflow, known=True, first_step=1, **attributes):
    """Return a run as read from a log: each step's loss scale, overflow flag, and whether the flag is certain.

    ``attributes`` are columns or other attributes of the run.
    """
    columns = {name: values for name in COLUMNS if (values := attributes.pop(name, None)) is not None}
    step = np.arange(first_step, first_step + len(scale))
    return RecordedRun.of_steps(step, scale, overflow, known, columns=columns, files=("run.log",), **attributes)


def assert_follows(rule, state, lines):
    """Assert that a rule's replay from ``state`` gives the known fields of all record lines; return its last state."""
    for line in lines:
        assert line["loss_scale"] == state.loss_scale
        state = rule.step(state, line["overflow"], line.get("largest_gradient"))
        after = {"next_loss_scale": state.loss_scale, **state._asdict()}
        known = [field for field in FIELDS[4:10] if line.get(field) is not None]
        assert {field: line[field] for field in known} == {field: after[field] for field in known}
    return state


def missing(first, last):
    """Return the line of a run record that stands for the steps which the monitor missed."""
    return {"missing_steps": last - first + 1, "first_step": first, "last_step": last}

"""Make random runs of loss scaling, write their logs in each format, such as Megatron-LM's, and read them."""

import json
from typing import NamedTuple

import numpy as np

from mindformers_adaptive.record.logs import read_log

STAMP = "[2024-11-04 11:41:27,602] [INFO] "
MEGATRON_DEEPSPEED = " samples per second: 26.440 | TFLOPs: 59.10 |"


def read(folder, *lines, **options):
    """Write lines of text or bytes to a log in a folder, and read this log."""
    content = b"".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    (folder / "run.log").write_bytes(content)
    return read_log(folder / "run.log", **options)


class Run(NamedTuple):
    """A run: for each step from 1 on, its overflow flag, its loss scale, and the loss scale after the step."""

    flags: list[bool]
    used: list[float]
    after: list[float]


def random_run(random, steps, smallest=2.0**-6):
    """Return a run of a dynamic rule with random window, hysteresis and smallest scale, on ceilings that collapse."""
    window, hysteresis = int(random.choice([1, 2, 5, 20])), int(random.integers(1, 4))
    floor = max(smallest, 2.0 ** random.choice([-6, 0, 10]))
    ceilings = random.choice([3, 12, 20]) + random.choice([0.3, 3]) * random.standard_normal(steps)
    if random.random() < 0.3:
        first = random.integers(0, steps)
        ceilings[first : first + random.integers(1, 60)] = -10
    scale, clean, tolerated, rows = max(2.0 ** random.choice([8, 16, 32]), floor), 0, hysteresis, []
    for ceiling in ceilings:
        overflow, before = bool(np.log2(scale) > ceiling), scale
        clean, tolerated = (0, tolerated - 1) if overflow else (clean + 1, tolerated)
        if overflow and tolerated <= 0:
            scale, tolerated = max(scale / 2, floor), hysteresis
        elif clean == window:
            scale, clean, tolerated = min(scale * 2, 2.0**100), 0, hysteresis
        rows.append((overflow, before, scale))
    return Run(*map(list, zip(*rows, strict=True)))


def ends(run, every):
    return range(every, len(run.flags) + 1, every)


def mindformers_line(step, flag, scale, epoch=1, steps=10_000, loss=4.155150, norm="[1.5]"):
    flagged = "" if flag is None else f"overflow cond: {flag}, "
    return (
        f"2026-01-01 00:00:00,000 - [mindformers/core/callback/callback.py:529] - INFO - {{ Epoch:[  {epoch}/  2], "
        f"step:[{step:5d}/{steps:5d}], loss: {loss}, per_step_time: 250ms, lr: 0.001, {flagged}"
        f"loss_scale: {scale}, global_norm: {norm}, train_throughput_per_npu: 0.004T\n"
    )


def mindformers(run, every=1, with_flags=True):
    scales = [np.array(scale, np.float32) for scale in run.after]
    return [
        mindformers_line(step, run.flags[step - 1] if with_flags else None, scales[step - 1])
        for step in ends(run, every)
    ]


def mindspore(run, every=1):
    return [
        f"epoch: 1, step: {step}, outputs are (Tensor(shape=[], dtype=Float32, value= 1.5), "
        f"Tensor(shape=[], dtype=Bool, value= {run.flags[step - 1]}), "
        f"Tensor(shape=[], dtype=Float32, value= {run.after[step - 1]:g}))\n"
        for step in ends(run, every)
    ]


def megatron_line(step, scale, skipped=0, end="", prefix=" "):
    return (
        f"{prefix}iteration {step:8d}/  500000 | consumed samples: {step:8d} | elapsed time per iteration (ms): 1250.0 "
        f"| learning rate: 1.500E-04 | lm loss: 2.500000E+00 | loss scale: {scale:.1f} | grad norm: 16.999 "
        f"| number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |{end}\n"
    )


def megatron(run, every=1, first_line=False):
    """Return the log lines of Megatron-LM for a run. Newer versions print the first step on a separate line."""
    lines = [megatron_line(1, run.after[0], run.flags[0])] if first_line and every > 1 else []
    for step in ends(run, every):
        lines.append(megatron_line(step, run.after[step - 1], sum(run.flags[step - every : step])))
    return lines


def overflow_line(scale, after, rank=0, source="loss_scaler"):
    end = f"reducing to {after}" if after < scale else "but hysteresis is 2. Reducing hysteresis to 1"
    return (
        f"{STAMP}[{source}.py:181:update_scale] [deepspeed] OVERFLOW! Rank {rank} Skipping step. "
        f"Attempted loss scale: {scale}, {end}\n"
    )


def progress_line(step, skipped):
    return f"{STAMP}[logging.py:96:log_dist] [Rank 0] step={step}, skipped={skipped}, lr=[0.001], mom=[[0.8, 0.999]]\n"


def deepspeed(run, every=10, ranks=1, iterations=0, totals=True):
    """Return the log lines of DeepSpeed for a run, with a Megatron-DeepSpeed line after every few iterations."""
    lines = []
    for step, (flag, used, after) in enumerate(zip(*run, strict=True), start=1):
        if flag:
            lines += [overflow_line(used, after, rank) for rank in range(ranks)]
        if totals and step % every == 0:
            lines.append(progress_line(step, sum(run.flags[:step])))
        if iterations and step % iterations == 0:
            lines.append(megatron_line(step, after, end=MEGATRON_DEEPSPEED))
    return lines


def record_line(step, overflow=False, loss_scale=1024.0, **changes):
    values = {"step": step, "loss": 2.5, "overflow": overflow, "loss_scale": loss_scale, "skipped_steps": None}
    return json.dumps({**values, "next_loss_scale": loss_scale / (2 if overflow else 1), **changes}) + "\n"


def record(run, every=1, history=1, counted=True):
    """Return the record lines of a run whose host reads the device only once every ``every`` steps.

    The device keeps the last ``history`` steps, so the record has the steps before them as missing.
    """
    lines = []
    for last in ends(run, every):
        first = max(last - history, last - every) + 1
        if first > last - every + 1:
            gap = {"missing_steps": first - 1 - last + every, "first_step": last - every + 1, "last_step": first - 1}
            lines.append(json.dumps(gap) + "\n")
        for step in range(first, last + 1):
            flag, used, after = (values[step - 1] for values in run)
            count = sum(run.flags[:step]) if counted else None
            lines.append(record_line(step, flag, used, next_loss_scale=after, skipped_steps=count))
    return lines


# For each format, a function that returns the log lines of a run with a line after every so many steps.
WRITERS = {
    "mindformers": lambda run, every: mindformers(run, every),
    "mindformers without flags": lambda run, every: mindformers(run, every, with_flags=False),
    "mindspore": lambda run, every: mindspore(run, every),
    "megatron": lambda run, every: megatron(run, every),
    "megatron with its first step": lambda run, every: megatron(run, every, first_line=True),
    "deepspeed": lambda run, every: deepspeed(run, every),
    "deepspeed of three ranks": lambda run, every: deepspeed(run, every, ranks=3),
    "megatron-deepspeed": lambda run, every: deepspeed(run, 10, iterations=every),
    "megatron-deepspeed without totals": lambda run, every: deepspeed(run, totals=False, iterations=every),
    "record": lambda run, every: record(run, every),
    "record with some steps": lambda run, every: record(run, every, history=3),
    "record without counts": lambda run, every: record(run, every, counted=False),
}

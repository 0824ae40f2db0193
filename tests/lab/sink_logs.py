"""Logs as MindFormers writes them in sink mode, of runs by a rule on given ceilings."""

import numpy as np

# As mindformers/core/callback/callback.py of version 1.9 prints it in sink mode.
LINE = (
    "2026-11-21 08:48:55,288 - mindformers/output/log[mindformers/core/callback/callback.py:747] - INFO - "
    "{ Epoch:[%3d/%3d], step:[%5d/%5d], loss: %5.6f, per_step_time: %dms, lr: %s, overflow cond: %s, loss_scale: %s, "
    "global_norm: %s, train_throughput_per_npu: 0.004T\n"
)


def write_sink_log(path, overflow, next_scales, sink):
    """Write a line for each sink: the flag of its last step and, as a float32 array prints it, the scale after it."""
    steps = len(overflow)
    path.write_text(
        "".join(
            LINE % (1, 1, step, steps, 4.15, 43, 0.001, overflow[step - 1], np.array(scale, np.float32), "[1.5]")
            for step, scale in zip(range(1, steps + 1), next_scales, strict=True)
            if step % sink == 0
        ),
        encoding="utf-8",
    )
    return path


def run_of(policy, ceilings):
    """The flags of a run by a rule, and the scale after each step; gradients show the ceilings."""
    scales, flags = [], []
    for ceiling in ceilings:
        flags.append(bool(policy.loss_scale > ceiling))
        scales.append(policy.step(flags[-1], None if flags[-1] else 65504.0 / ceiling))
    return flags, scales

"""Logs of which a line stands for several steps: the number of skipped steps lies within the stated bounds."""

import numpy as np
import pytest

from mindformers_adaptive.lab.logs import read_log
from mindformers_adaptive.lab.policies import make_policy

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
    """The flags of a run by a rule, and the scale after each step."""
    scales, flags = [], []
    for ceiling in ceilings:
        flags.append(bool(policy.loss_scale > ceiling))
        scales.append(policy.step(flags[-1]))
    return flags, scales


RULES = {
    "adaptive": lambda start: make_policy("adaptive", loss_scale_value=start),
    "adaptive from window 5": lambda start: make_policy("adaptive", loss_scale_value=start, min_scale_window=5),
    "adaptive from window 1": lambda start: make_policy(
        "adaptive", loss_scale_value=start, min_scale_window=1, max_scale_window=50, shrink_from_min_window=True
    ),
    "hysteresis 3": lambda start: make_policy("adaptive", loss_scale_value=start, hysteresis=3, min_scale_window=10),
    "floor and cap": lambda start: make_policy(
        "adaptive", loss_scale_value=start, min_loss_scale=2.0**12, max_loss_scale=2.0**32, min_scale_window=7
    ),
    "a floor that is no power of two": lambda start: make_policy(
        "adaptive", loss_scale_value=start, min_loss_scale=5000.0, min_scale_window=3
    ),
    "factor 4": lambda start: make_policy("adaptive", loss_scale_value=start, scale_factor=4, min_scale_window=5),
    "factor 1.5": lambda start: make_policy("adaptive", loss_scale_value=start, scale_factor=1.5, min_scale_window=2),
    "factor 3": lambda start: make_policy("adaptive", loss_scale_value=start, scale_factor=3, min_scale_window=2),
    "dynamic": lambda start: make_policy("dynamic", init_loss_scale=start, scale_window=20),
    "dynamic, every step": lambda start: make_policy("dynamic", init_loss_scale=start, scale_window=1),
    "megatron": lambda start: make_policy("megatron", initial_scale=start, growth_interval=15),
}


def ceilings_of(seed, steps):
    """Ceilings of some level and spread, at times so low that the scale stays at its floor."""
    random = np.random.default_rng(seed)
    level, spread = random.uniform(8, 24), random.choice([0.0, 0.3, 1.0, 3.0])
    ceilings = np.exp2(level + spread * random.standard_normal(steps))
    if random.random() < 0.3:
        first = random.integers(0, steps)
        ceilings[first : first + random.integers(1, 60)] = random.choice([0.0, 2.0**4])
    return ceilings


@pytest.mark.parametrize("sink", [2, 4, 10, 50])
def test_the_truth_lies_within_the_bounds(tmp_path, sink):
    widths = []
    for seed in range(200):
        random = np.random.default_rng([seed, sink])
        rule = list(RULES)[seed % len(RULES)]
        start = 2.0 ** random.choice([13, 16, 24, 32])
        flags, scales = run_of(RULES[rule](start), ceilings_of(seed, 400))
        run = read_log(write_sink_log(tmp_path / "sink.log", flags, scales, sink))
        assert len(run) == 400
        for steps in [*range(sink, 401, sink), *random.integers(1, 400, 5)]:
            fewest, most = run.skipped_bounds(steps)
            assert fewest <= sum(flags[:steps]) <= most, (rule, start, seed, steps)
        known = run.position_known
        assert (run.overflow[known] == np.array(flags)[known]).all(), (rule, seed)
        trace = run.to_trace()
        used = np.array([start, *scales[:-1]])
        assert (trace.lower_bound <= np.where(flags, 0, used * (1 + 1e-6))).all(), (rule, seed)
        assert (trace.upper_bound >= np.where(flags, used * (1 - 1e-6), np.inf)).all(), (rule, seed)
        widths.append(np.subtract(*run.skipped_bounds()[::-1]))
    assert min(widths) < 400 * (sink - 1) / sink

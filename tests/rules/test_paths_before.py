"""The adaptive rule takes the same steps, bit for bit, as in earlier versions of its code."""

import hashlib
import json
from pathlib import Path

import numpy as np

from mindformers_adaptive.rules.adaptive import AdaptiveRule

# Hashes of the states in random runs, computed by an earlier version of the code. With a hysteresis of 1, the budget is
# 1 in each of these states, as in the update cell.
BEFORE = json.loads(Path(__file__).with_name("paths_before.json").read_text(encoding="utf-8"))
STEPS = 500


def adaptive_paths(random, count):
    """Yield, for each of ``count`` random adaptive rules, a digest of its states in a run with random overflows."""
    for _ in range(count):
        smallest = int(random.integers(1, 30))
        rule = AdaptiveRule(
            float(random.choice([2, 3, 1.5, 4, 10])),
            smallest + int(random.integers(0, 300)),
            smallest,
            hysteresis=int(random.integers(1, 4)),
            shrink_from_min_window=bool(random.integers(2)),
            min_loss_scale=float(random.choice([1, 0.25, 100])),
            max_loss_scale=random.choice([None, 2.0**24, 2.0**100]),
            backoff_factor=random.choice([None, 0.5, 0.1]),
        )
        state, digest = rule.start(2.0**16, rule.ladder[int(random.integers(len(rule.ladder)))]), hashlib.sha256()
        rate = random.choice([0.002, 0.02, 0.1, 0.4])
        for _ in range(STEPS):
            state = rule.step(state, bool(random.random() < rate))
            digest.update(repr(tuple(state)).encode())
        yield digest.hexdigest()


def test_adaptive_rules_take_the_steps_of_before():
    assert [*adaptive_paths(np.random.default_rng(5), len(BEFORE["adaptive"]))] == BEFORE["adaptive"]

"""Both rules take the steps that they took when they were written by hand, before steps were traced, bit for bit."""

import hashlib
import json
import warnings
from pathlib import Path

import numpy as np

from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.guided import GuidedRule

# Made by these functions with the rules of before.
BEFORE = json.loads(Path(__file__).with_name("paths_before.json").read_text(encoding="utf-8"))
STEPS = 500


def adaptive_paths(random, count):
    """Yield digests of all states of random rules on random overflows."""
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


def guided_paths(random, count):
    """Yield digests of all states of random rules on a ceiling that wanders, and gradients that differ from it."""
    for _ in range(count):
        rule = GuidedRule(
            float(random.choice([0.001, 0.2, 1, 5, 50, 333, 1000])),
            min_loss_scale=float(random.choice([1, 0.25])),
            max_loss_scale=random.choice([None, 2.0**24]),
            gradient_format=str(random.choice(["float16", "float8_e4m3fn", "bfloat16"])),
        )
        state, digest, level = rule.start(2.0**10), hashlib.sha256(), 18.0
        for _ in range(STEPS):
            level += random.normal(0, 0.3)
            gradient = float(np.float32(65504 / 2**level * 2 ** random.normal(0, 1)))
            overflow = bool(state.loss_scale > 2**level or random.random() < 0.02)
            state = rule.step(state, overflow, None if overflow or random.random() < 0.05 else gradient)
            digest.update(repr(tuple(state)).encode())
        yield digest.hexdigest()


def test_adaptive_rules_take_the_steps_of_before():
    assert [*adaptive_paths(np.random.default_rng(5), len(BEFORE["adaptive"]))] == BEFORE["adaptive"]


def test_guided_rules_take_the_steps_of_before():
    with warnings.catch_warnings(record=True) as caught:
        assert [*guided_paths(np.random.default_rng(6), len(BEFORE["guided"]))] == BEFORE["guided"]
    assert caught == []

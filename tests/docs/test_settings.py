"""With settings translated by the documentation's tables, adaptive scaling takes the steps of torch and DeepSpeed."""

import random
import re

import pytest

from mindformers_adaptive.lab.running_rule import PRESETS, start_rule
from tests.conftest import ROOT
from tests.shared.pages import ENGLISH_DOCS, tables

WINDOWS = ("scale_window", "max_scale_window", "min_scale_window")
# Arguments of the torch and the DeepSpeed rule, and the arguments of the adaptive rule that replace them according to
# the migration page. The windows are so short that the loss scale often rises.
SHORT = {
    "torch": ({"growth_interval": 5}, dict.fromkeys(WINDOWS, 5) | {"min_loss_scale": 1e-30}),
    "deepspeed": ({"init_scale": 2.0**16, "scale_window": 5}, dict.fromkeys(WINDOWS, 5)),
}


def windows(value):
    return dict.fromkeys(WINDOWS, value)


# The settings of torch and DeepSpeed in the tables of the migration page. Each setting has four items: the argument of
# the torch or DeepSpeed rule; values of the setting to try; a function from such a value to this argument's value;
# and a function from such a value to arguments of the adaptive rule.
ROWS = {
    "torch": {
        "init_scale": ("init_scale", (2.0**16, 3.0, 2.0**-4), float, lambda value: {"loss_scale_value": value}),
        "growth_factor": (
            "growth_factor",
            (2.0, 4.0, 1.5),
            float,
            # Also set torch's default backoff_factor 0.5. The adaptive rule's default would be 1/4.0 or 1/1.5.
            lambda value: {"scale_factor": value, "backoff_factor": 0.5},
        ),
        "backoff_factor": ("backoff_factor", (0.5, 0.25, 0.75), float, lambda value: {"backoff_factor": value}),
        "growth_interval": ("growth_interval", (1, 7, 300), int, windows),
    },
    "deepspeed": {
        "initial_scale_power": ("init_scale", (0, 16, 32), lambda p: 2.0**p, lambda p: {"loss_scale_value": 2.0**p}),
        "loss_scale_window": ("scale_window", (1, 7, 300), int, windows),
        "hysteresis": ("delayed_shift", (1, 2, 5), int, lambda value: {"hysteresis": value}),
        "min_loss_scale": ("min_scale", (1.0, 2.0**12), float, lambda value: {"min_loss_scale": value}),
    },
}
CASES = [(system, row, value) for system, rows in ROWS.items() for row, it in rows.items() for value in it[1]]


def paths(system, its, ours, steps=800, seed=0):
    """Yield the loss scales of another system and of adaptive scaling on random, partly consecutive overflows."""
    draw = random.Random(seed)
    rules = start_rule(system, **its), start_rule("adaptive", **{"loss_scale_value": 2.0**16} | ours)
    for _ in range(steps):
        # Overflow above a random ceiling, so that the loss scale neither collapses nor grows without end.
        overflow = rules[0].loss_scale > 2.0 ** draw.gauss(18, 4)
        yield tuple(rule.step(overflow) for rule in rules)


@pytest.mark.parametrize(("system", "row", "value"), CASES)
def test_both_take_the_same_steps(system, row, value):
    name, _, its_value, our_value = ROWS[system][row]
    its, ours = SHORT[system]
    scales = list(paths(system, its | {name: its_value(value)}, ours | our_value(value)))
    assert [ours for _, ours in scales] == [its for its, _ in scales]
    assert len(set(scales)) > 5


def test_factor_beyond_float32_is_rounded_as_on_the_page():
    its, ours = SHORT["torch"]
    scales = list(paths("torch", its | {"backoff_factor": 0.7}, ours | {"backoff_factor": 0.7}))
    assert any(first != second for first, second in scales)
    assert [ours for _, ours in scales] == pytest.approx([its for its, _ in scales], rel=1e-5)


def test_scale_of_torch_falls_below_the_default_bound():
    its, ours = SHORT["torch"]
    rules = start_rule("torch", **its), start_rule("adaptive", **ours | {"loss_scale_value": 2.0**16})
    assert [[rule.step(True) for _ in range(60)] for rule in rules] == [[2.0 ** (15 - n) for n in range(60)]] * 2


@pytest.mark.parametrize(("hysteresis", "same"), [(1, True), (2, False)])
def test_consecutive_hysteresis_matters_from_2_on(hysteresis, same):
    its, ours = SHORT["deepspeed"]
    its |= {"delayed_shift": hysteresis, "consecutive_hysteresis": True}
    scales = list(paths("deepspeed", its, ours | {"hysteresis": hysteresis}))
    assert all(first == second for first, second in scales) is same


# Defaults of DeepSpeed's configuration that differ from the defaults of its loss scaler's class.
CONFIGURED = {"initial_scale_power": "16", "hysteresis": "2"}


@pytest.mark.parametrize("system", ROWS)
def test_page_has_these_rows_with_their_names_and_defaults(system):
    heading = {"torch": "argument of `GradScaler`", "deepspeed": "key under `fp16`"}[system]
    [table] = [rows[2:] for rows in tables(ENGLISH_DOCS / "migrating.md") if rows[0][0] == heading]
    rows = {re.match(r"`(\w+)[=:]", row[0])[1]: row[1:] for row in table if row[0].startswith("`")}
    assert set(ROWS[system]) == set(rows) - {"enabled", "loss_scale", "consecutive_hysteresis"}
    for name, (own_name, values, _, our_value) in ROWS[system].items():
        default, settings = rows[name]
        shown = set(re.findall(r"`(\w+)(?:: \w+)?`", settings)) - set(ROWS["torch"]) | {"backoff_factor"}
        assert set(our_value(values[0])) <= shown, name
        known = PRESETS[system].parameters[own_name].default
        assert default == CONFIGURED.get(name, f"{known:g}") or default == f"2^{known:.0f}".replace("65536", "16"), name


def test_yaml_names_the_guided_rule_by_its_short_name():
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").glob("*.yaml")]
    long = re.compile(r"^ *(- )?type: *['\"]?GradientGuidedLossScaleUpdateCell", re.MULTILINE)
    assert [file.name for file in files if long.search(file.read_text(encoding="utf-8"))] == []

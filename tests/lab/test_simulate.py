"""Replays rules on hand-made traces; compares the rules' averages over the traces."""

import dataclasses
import json
import re
from functools import partial

import numpy as np
import pytest

from mindformers_adaptive.lab.replay import compare, replay
from mindformers_adaptive.lab.running_rule import start_rule
from mindformers_adaptive.record.trace import Trace
from tests.shared.traces import made_trace, with_gradients

SMALL = {"loss_scale_value": 16.0, "max_scale_window": 3, "min_scale_window": 2}


def test_replay_shows_scale_flag_and_window_of_each_step():
    trace = Trace.exact("made", [16, 8, 8, 8, 8, 8])
    rule = start_rule("adaptive", **SMALL)
    replayed = replay(rule, trace)
    assert replayed.loss_scale.tolist() == [16, 16, 8, 8, 16, 8]
    assert replayed.overflow.tolist() == [False, True, False, False, True, False]
    assert replayed.scale_window.tolist() == [2] * 6
    assert (rule.loss_scale, rule.state()["skipped_steps"]) == (8.0, 2)
    assert (replayed.measures.skipped, replayed.measures.headroom_lost) == (2, 0.0)


def test_replay_goes_on_from_the_state_that_the_rule_is_in():
    rule, whole = start_rule("adaptive", **SMALL), start_rule("adaptive", **SMALL)
    ceilings = [16, 8, 32, 8, 64, 64, 64, 2, 2]
    parts = [replay(rule, Trace.exact("part", part)) for part in (ceilings[:4], ceilings[4:])]
    scales = replay(whole, Trace.exact("whole", ceilings)).loss_scale.tolist()
    assert parts[0].loss_scale.tolist() + parts[1].loss_scale.tolist() == scales
    assert rule.state() == whole.state()


def fixed(scale):
    return partial(start_rule, "fixed", loss_scale_value=scale)


def test_comparison_has_a_row_for_each_rule_and_trace():
    traces = [Trace.exact("low", [4.0] * 4), Trace.exact("high", [16.0] * 4), Trace.exact("free", [float("inf")] * 4)]
    comparison = compare({"two": fixed(2.0), "eight": fixed(8.0)}, traces)
    rows = {(row["rule"], row["trace"]): row for row in comparison.rows()}
    assert rows.keys() == {(rule, trace) for rule in ("two", "eight") for trace in ("low", "high", "free", None)}
    assert [rows["two", trace]["headroom_lost"] for trace in ("low", "high", "free", None)] == [1.0, 3.0, None, 2.0]
    assert [rows["eight", trace]["skipped"] for trace in ("low", "high", "free", None)] == [4, 0, 0, 4 / 3]
    json.dumps(comparison.rows(), allow_nan=False)


@pytest.mark.parametrize("lengths", [(40, 40), (40, 60)])
def test_comparison_equals_single_replays(lengths):
    drops = [made_trace("sudden drop", steps, seed=steps) for steps in lengths]
    traces = [dataclasses.replace(trace, name=str(len(trace))) for trace in drops]
    done = []
    comparison = compare({"guided": partial(start_rule, "guided")}, traces, progress=done.append)
    for trace, measures in zip(traces, comparison.measures["guided"], strict=True):
        expected = replay(start_rule("guided"), trace).measures
        assert measures.as_dict() == pytest.approx(expected.as_dict())
    assert done == [1, 2]


def test_comparison_as_text_is_sorted():
    rules = {"thirty-two": fixed(32.0), "one": fixed(1.0), "sixteen": fixed(16.0)}
    comparison = compare(rules, [Trace.exact(name, [16.0] * 4) for name in "ab"])
    lines = comparison.text(each_trace=True).split("\n\n")[1].splitlines()
    # Each row of the table has the rule's initial loss scale, because the results depend on this scale.
    assert [line.split()[:2] for line in lines[1:10]] == [
        [name, trace] for name in ("sixteen", "one", "thirty-two") for trace in ("a", "b", "(mean)")
    ]
    assert {row["rule"]: row["start"] for row in comparison.rows()} == {
        "one": 1.0,
        "sixteen": 16.0,
        "thirty-two": 32.0,
    }
    assert comparison.text().startswith("Fewest steps skipped: sixteen, one.")
    assert "The log shows" not in comparison.text()


def test_a_scale_that_is_always_too_low_is_not_praised():
    scales = {"always too low": 1.0, "good": 2.0**17, "too high": 2.0**19}
    ceilings = [2.0**18] * 9 + [2.0**16]
    text = compare({name: fixed(scale) for name, scale in scales.items()}, [Trace.exact("made", ceilings)]).text()
    assert text.splitlines()[0].endswith("16 bits too low: good.")
    assert [line.split("  ")[0] for line in text.split("\n\n")[1].splitlines()[1:]] == [
        "good",
        "always too low",
        "too high",
    ]


def test_rules_that_skip_as_much_are_not_compared():
    text = compare({"two": fixed(2.0), "four": fixed(4.0)}, [Trace.exact("calm", [8.0] * 4)]).text()
    assert text.splitlines()[0].endswith("the same for all rules.")


def test_a_known_share_of_0_is_shown():
    trace = Trace("log", np.full(4, 16.0), np.zeros(4), np.full(4, np.inf))
    text = compare({"one": fixed(1.0)}, [trace]).text()
    assert re.search(r"No rule .* best: .* steps of one, .* 0%", text)
    assert "Fewest" not in text
    assert "All rules start at 2^0." in text


@pytest.mark.parametrize(
    ("rules", "traces", "message"),
    [
        ({}, [Trace.exact("made", [1.0])], r"'rules' must have at least 1 entry, but got none"),
        ({"one": fixed(1.0)}, [], r"'traces' must have at least 1 entry, but got none"),
        ({"one": partial(start_rule, "guided")}, [Trace.exact("empty", [])], r"The trace 'empty' must have at least"),
        ({"one": fixed(1.0)}, [Trace.exact("empty", [])], r"The trace 'empty' must have at least 1 step"),
    ],
)
def test_nothing_to_compare_is_refused(rules, traces, message):
    with pytest.raises(ValueError, match=message):
        compare(rules, traces)


class Listener:
    """A rule with a fixed scale that stores the arguments of each step."""

    scale_window, loss_scale = None, 8.0

    def __init__(self):
        self.steps = []

    def step(self, overflow, largest_gradient=None):
        self.steps.append((overflow, largest_gradient))
        return self.loss_scale

    def state(self):
        return {}


def test_rule_gets_the_largest_gradient_of_applied_steps_only():
    trace = Trace.exact("made", [16.0, 4.0, 8.0])
    listener = Listener()
    replay(listener, trace)
    assert listener.steps == [(False, None), (True, None), (False, None)]
    listener = Listener()
    replay(listener, with_gradients(trace))
    assert listener.steps == [(False, 65504 / 16), (True, None), (False, 65504 / 8)]

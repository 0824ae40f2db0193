"""What is wrong in the steps of a training: each symptom is found where it is, once an episode, and nowhere else."""

import json
import math
import re

import numpy as np
import pytest

from mindformers_adaptive.lab.analysis import analyze, explanation_of
from mindformers_adaptive.record.diagnosis import (
    BadGradients,
    BadLoss,
    Collapse,
    Diagnosis,
    LateStreak,
    LossJump,
    LowScale,
    diagnose,
)
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.run_folder import EXPLANATION_FILE
from mindformers_adaptive.record.symptom import Seen
from tests.record.log_writers import record_line


def signs(symptom, steps):
    """Return by step what a symptom says of steps, given as dicts without their numbers, or as losses."""
    steps = (step if isinstance(step, dict) else {"loss": step} for step in steps)
    said = {number: symptom.feed(Seen(number, **step)) for number, step in enumerate(steps, 1)}
    return {number: sign for number, sign in said.items() if sign}


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ([4.2, 10402.0, 9000.0], [2]),
        ([4.2, None, 4.1, 80.0], [4]),
        ([0.7, math.nan, 0.6, 12.0, 400.0], [4]),
        # A loss that falls back and jumps again.
        ([4.2, 10402.0, 4.0, 3.9, 10402.0], [2, 5]),
        # A loss that stays at a multiple of the largest loss before.
        ([4.3, 2.8, *[22.5] * 10], [7]),
        # After some time, what was a jump is the usual loss.
        ([4.2, *[50.0] * 30, 600.0], [2, 32]),
        # Learning curves, noise around 0, and a spike of five times the loss are no jump.
        ([11.0, 9.0, 6.0, 5.5], []),
        ([1e-9, 0.02, -0.03, 0.9, 0.001], []),
        ([0.15, 0.15, 0.71], []),
        ([4.3, 2.8, *[22.5] * 4, 3.0, 22.5], []),
        ([-20.0, 30.0, -40.0], []),
        ([math.nan, 5.0, 4.0], []),
    ],
)
def test_a_jump_is_ten_times_all_losses_or_a_lasting_rise(losses, steps):
    said = signs(LossJump(), losses)
    assert list(said) == steps
    assert all("learning rate" in sign.remedy for sign in said.values())


@pytest.mark.parametrize(
    ("losses", "overflows", "steps"),
    [
        # The update of the last step with a finite loss broke the weights: the loss stays inf or NaN.
        ([4.2, math.nan, math.nan, math.nan, math.nan], "0....", [4]),
        ([4.2, 3.9, math.inf, math.nan, math.inf], "00...", [5]),
        ([4.2, math.inf, math.nan, math.nan], "?...", [4]),
        ([4.2, None, math.nan, math.nan, math.nan], "00...", [5]),
        # No update came before: the weights or the data are bad from the start.
        ([math.nan] * 6, "......", []),
        # Bad batches are skipped, and the next loss is finite.
        ([4.2, math.nan, 4.1, math.nan, math.nan, 4.0], "0.0..0", []),
        # The last step with a finite loss was skipped, so its update changed nothing.
        ([4.2, 4.1, math.nan, math.nan, math.nan], "01...", []),
    ],
)
def test_a_loss_that_stays_bad_after_an_update_is_said(losses, overflows, steps):
    known = {"0": False, "1": True, ".": True, "?": None}
    pairs = zip(losses, overflows, strict=True)
    said = signs(LossJump(), [{"loss": loss, "overflow": known[mark]} for loss, mark in pairs])
    assert list(said) == steps
    # The data may be to blame too: three bad batches in a row look alike.
    assert all("learning rate" in sign.remedy and "batches" in sign.remedy for sign in said.values())


def test_a_bad_loss_is_told_where_it_begins_and_ends_each_time():
    bad, good = {"loss": math.nan, "overflow": True}, {"loss": 2.5, "overflow": False}
    said = signs(BadLoss("batch.npz"), [good, good, bad, bad, good, {"loss": None}, bad, good, bad, bad])
    assert {step: sign.text.partition(".")[0] for step, sign in said.items()} == {
        3: "The loss of step 3 is nan, and no loss scale can help: the loss has this value before it is scaled",
        5: "The loss was nan in steps 3 to 4 only: look at that batch (batch",
        7: "The loss of step 7 is nan, and no loss scale can help: the loss has this value before it is scaled",
        8: "The loss was nan in step 7 only: look at that batch (batch",
        9: "The loss of step 9 is nan, and no loss scale can help: the loss has this value before it is scaled",
    }
    assert [bool(sign.remedy) for sign in said.values()] == [True, False, True, False, True]
    assert "happened 3 times" in said[9].text


def test_a_symptom_that_returns_often_does_not_fill_the_log():
    said = signs(BadLoss("..."), [math.nan, 1.0] * 100)
    begun = [sign for sign in said.values() if sign.remedy]
    assert len(begun) == len([count for count in range(1, 101) if count <= 4 or count in (8, 16, 32, 64)])
    assert len(said) == 2 * len(begun)


def test_only_an_applied_bad_loss_is_said_to_change_weights():
    bad_loss, bad = BadLoss("..."), {"loss": math.nan, "overflow": True}
    unknown, dropped = bad | {"overflow": None}, bad | {"overflow": False, "dropped_by_norm": True}
    said = signs(bad_loss, [bad, unknown, dropped, *[bad | {"overflow": False}] * 2])
    assert list(said) == [1, 4]
    assert "weights have changed" not in said[1].text + said[1].remedy
    for part in ("weights have changed", "checkpoint before", "check_for_nan_in_loss_and_grad"):
        assert part in said[4].text
    assert "2 of these steps" in bad_loss.finding().remedy


def overflows(count, **entry):
    return [{"overflow": True, "loss": 2.5, "loss_scale": 8.0, "next_loss_scale": 8.0, **entry}] * count


def falling(count, exponent=100):
    return [{"overflow": True, "loss_scale": 2.0 ** (exponent - step)} for step in range(count)]


CLEAN = {"overflow": False, "loss": 2.5, "loss_scale": 8.0, "next_loss_scale": 8.0}


@pytest.mark.parametrize(
    ("limit", "steps", "told_at"),
    [
        (50, falling(49), []),
        (50, falling(120), [50, 100]),
        (50, overflows(9), []),
        (50, overflows(60), [10, 50]),
        (50, [*falling(8), *overflows(12)], [18]),
        (50, [CLEAN, *overflows(10), CLEAN, *overflows(10)], [11, 22]),
        (3, [*falling(7), CLEAN], [3, 6]),
        (3, overflows(7), [3, 6]),
        (1000, overflows(250), [200]),
        (None, overflows(1000), []),
        # Between overflows at one scale that each lowered it, a step was applied.
        (50, overflows(60, next_loss_scale=4.0), []),
        # Steps of which nothing is known neither end the row nor count in it.
        (3, [*falling(2), {"overflow": None}, *falling(1)], [4]),
    ],
)
def test_a_collapse_is_many_overflows_or_fewer_at_one_scale(limit, steps, told_at):
    assert list(signs(Collapse(limit), steps)) == told_at


def test_a_collapse_counts_what_the_device_has_counted():
    collapse = Collapse(3)
    rows = [
        collapse.feed(Seen(step, overflow=True, consecutive_overflows=row)) for step, row in ((2, 2), (7, 7), (9, 9))
    ]
    assert [bool(row) for row in rows] == [False, True, True]
    assert collapse.finding().figures == {"steps": 9, "first_step": 1, "last_step": 9}


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        (overflows(10, loss=math.nan), "The loss itself is nan, .*no loss scale can help: .* NaN or inf"),
        (
            overflows(10, loss_scale=1.0, next_loss_scale=1.0),
            r"falls no further \(min_.* normalization in FP16",
        ),
        (overflows(10), "stays where it is.* min_loss_scale, hysteresis or a fixed scale"),
        (overflows(10, follows_gradients=True), "stays where it is.* holds it there, min_loss_scale or a fixed scale"),
        (falling(50), "still falling: a lower loss_scale_value "),
    ],
)
def test_a_collapse_says_where_it_is_and_what_helps(steps, sentence):
    [sign] = signs(Collapse(50), steps).values()
    assert re.search(sentence, sign.remedy)
    scale = "at a loss scale of 2\\^" if "loss_scale" in steps[-1] else ""
    assert re.search(
        rf"collapsed: {len(steps)} steps in a row have overflowed and changed no weight, from step 1 to step .*{scale}",
        sign.text,
    )
    for advice in ("learning rate", "softmax", "layernorm_compute_type", "from a checkpoint"):
        assert advice in sign.remedy


def fell_to(exponent, clean=30, start=16):
    falls = [{"loss_scale": 2.0**power, "overflow": True} for power in range(start, exponent, -1)]
    return [*falls, *held(exponent, clean)]


def held(exponent, steps=30):
    return [{"loss_scale": 2.0**exponent, "overflow": False}] * steps


def test_a_low_scale_is_one_to_which_overflows_have_led():
    [(step, sign)] = signs(LowScale(), fell_to(6)).items()
    assert (step, "2^6" in sign.text) == (10 + 20, True)
    assert "2^5" in signs(LowScale(), fell_to(5))[11 + 20].text
    # A scale that somebody chose, and a scale that a run passed on its way up, are not low for overflows.
    for steps in (fell_to(8), fell_to(6, clean=19), held(6, 50), [*held(6, 50), *fell_to(12)]):
        assert signs(LowScale(), steps) == {}
    recovered, twice = LowScale(), LowScale()
    assert len(signs(recovered, [*fell_to(6), *held(7), *held(8)])) == 1
    assert recovered.finding() is None
    assert len(signs(twice, [*fell_to(6), *held(10), *fell_to(6, start=10)])) == 2
    assert "2^6" in twice.finding().text


def test_a_scale_that_vanishes_is_told_without_overflow_flags():
    falling_away = [{"next_loss_scale": 2.0**exponent} for exponent in range(0, -74, -1)]
    [(step, sign)] = signs(LowScale(), falling_away).items()
    assert (step, "after step 22" in sign.text) == (22, True)
    zeros = [{"next_loss_scale": scale} for scale in (0.5, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0)]
    assert list(signs(LowScale(), zeros)) == [6]


def test_a_jump_names_the_step_where_each_loss_was_seen():
    for losses, words in (([2.0, 2.1, 90.0], "in step 3"), ([2.0, None, 90.0], "up to step 3")):
        [sign] = signs(LossJump(), losses).values()
        assert words in sign.text
    means = LossJump()
    assert means.feed(Seen(10, 2.0, steps=10)) is None
    assert "up to step 20" in means.feed(Seen(20, 90.0, steps=10)).text


def test_bad_gradients_are_found_where_a_step_was_applied():
    norms = [1.0, math.nan, math.nan, 1.0, math.inf, math.inf]
    steps = [{"gradient_norm": norm, "overflow": False, "loss_scale": 8.0} for norm in norms]
    steps[4]["overflow"] = True
    symptom = BadGradients()
    assert list(signs(symptom, steps)) == [2, 6]
    assert symptom.finding().figures == {"steps": 3, "first_step": 2}
    assert signs(BadGradients(), [step | {"overflow": True} for step in steps]) == {}


def test_a_late_streak_leaves_a_worse_loss():
    calm, streak = [{"loss": 2.0, "overflow": False}] * 25, [{"loss": 2.0, "overflow": True}] * 6
    worse, same = [{"loss": 7.0, "overflow": False}] * 25, [{"loss": 2.1, "overflow": False}] * 25
    late = LateStreak()
    [(step, sign)] = signs(late, [*calm, *streak, *worse]).items()
    assert step == 25 + 6 + 20
    assert re.search(r"\b6 steps .* from step 26 to 31\b", sign.text)
    assert "the loss rose from 2 to 7" in sign.text
    # At the end of a run there may be fewer steps to judge by.
    for steps, is_found in (
        ([*calm, *streak, *worse[:3]], True),
        ([*calm, *streak, *same], False),
        ([*calm, *streak[:4], *worse], False),
        ([*calm[:19], *streak, *worse], False),
        ([*calm, {"overflow": None}, *streak, *worse], False),
    ):
        late = LateStreak()
        signs(late, steps)
        assert (late.finding() is not None) is is_found, steps


def test_the_likeliest_cause_comes_first():
    healthy = [{"loss": 2.0, "overflow": False, "loss_scale": 1024.0}] * 30
    nan = {"loss": math.nan, "overflow": True}
    stuck = [{**nan, "loss": 2.0, "loss_scale": 1.0}] * 12
    broken = [*healthy, {"loss": 400.0, "overflow": False, "loss_scale": 1024.0}, *[nan] * 60]
    for steps, kinds in (
        (healthy, []),
        (falling(49), []),
        (falling(50), ["collapse"]),
        ([*healthy[:9], nan, *healthy], ["bad loss"]),
        # One bad batch is over; the collapse lasts.
        ([*healthy[:9], nan, *healthy, *stuck], ["collapse", "bad loss"]),
        (broken, ["loss jump", "bad loss", "collapse"]),
    ):
        seen = [Seen(number, **step) for number, step in enumerate(steps, 1)]
        assert [finding.kind for finding in diagnose(seen)] == kinds
        live = Diagnosis()
        begun = [sign.kind for step in seen for sign in live.feed(step) if sign.remedy]
        assert {*begun} == {*kinds}


def test_a_low_scale_is_to_be_explained_and_not_started_at(tmp_path):
    file = record(tmp_path, [117.0] * 300)
    analysis = analyze(read_log(file))
    assert [advice.rule for advice in analysis.advice] == ["low scale"]
    assert analysis.scale_sense is None
    assert "adaptive-loss-scale why" in analysis.text()


def record(folder, losses, overflow_until=10):
    steps = enumerate(losses, 1)
    lines = [record_line(step, step <= overflow_until, 2.0 ** max(16 - step, 6), loss=loss) for step, loss in steps]
    file = folder / "loss_scale_record.jsonl"
    file.write_text("".join(lines))
    return file


def test_analysis_says_the_signs(tmp_path):
    text = analyze(read_log(record(tmp_path, [4.2, 10402.0, *[100.0] * 60]))).text()
    for part in ("learning rate", "1.04e+04 in step 2", "down to 2^6"):
        assert part in text.replace("\n", " ")
    healthy = analyze(read_log(record(tmp_path, np.linspace(4, 2, 60).tolist(), overflow_until=0))).text()
    assert "learning rate" not in healthy
    assert "unusually low" not in healthy


def test_an_explanation_beside_the_record_comes_first(tmp_path):
    file = record(tmp_path, [4.2] * 60)
    beside = tmp_path / EXPLANATION_FILE
    said = {"summary": ["The backward pass overflows: in lm_head", "What helps: float32"], "headline": "..."}
    beside.write_text(json.dumps({"step": 3, **said}) + "\n")
    analysis = analyze(read_log(file))
    assert analysis.to_dict()["verdict"][:2] == [
        "Step 3 was explained. The backward pass overflows: in lm_head.",
        "What helps: float32.",
    ]
    assert "in lm_head" in analysis.text().splitlines()[0]
    # Step 50 has neither an overflow nor a bad loss, so the explanation is from another run.
    for content in ({"step": 50, **said}, {"step": "3", **said}, {"step": 3, "summary": [1]}, [], None):
        beside.write_text(json.dumps(content))
        assert explanation_of(read_log(file)) == []
    beside.write_text("{broken")
    assert explanation_of(read_log(file)) == []
    beside.write_text(json.dumps(said))
    assert explanation_of(read_log(file))[0].startswith("The backward pass")

"""Signs in a recorded run: a jump of the loss, an unusually low scale, and the explanation beside the record."""

import json
import math

import numpy as np
import pytest

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.record.explanation_file import EXPLANATION_FILE, explanation_of
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.symptoms import LossJump, low_scale


def jumps(losses):
    jump = LossJump()
    return [step for step, loss in enumerate(losses, 1) if jump.check(step, loss)]


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ([4.2, 10402.0, 9000.0], [2]),
        ([4.2, None, 4.1, 80.0], [4]),
        ([0.7, math.nan, 0.6, 12.0, 400.0], [4]),
        # Learning curves, noise around 0, and a spike of five times the loss are no jump.
        ([11.0, 9.0, 6.0, 5.5], []),
        ([1e-9, 0.02, -0.03, 0.9, 0.001], []),
        ([0.15, 0.15, 0.71], []),
        ([-20.0, 30.0, -40.0], []),
        ([math.nan, 5.0, 4.0], []),
    ],
)
def test_a_jump_is_ten_times_all_losses_before(losses, steps):
    assert jumps(losses) == steps


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
    jump, known = LossJump(), {"0": False, "1": True, ".": True, "?": None}
    pairs = zip(losses, overflows, strict=True)
    messages = {step: jump.check(step, loss, known[mark]) for step, (loss, mark) in enumerate(pairs, 1)}
    messages = {step: message for step, message in messages.items() if message}
    assert list(messages) == steps
    assert all("learning rate" in message for message in messages.values())


def fell_to(exponent, clean=30, start=16):
    falls = [(2.0**power, True) for power in range(start, exponent, -1)]
    return [*falls, *[(2.0**exponent, False)] * clean]


def test_a_low_scale_is_one_to_which_overflows_have_led():
    assert "2^6" in low_scale(fell_to(6))
    assert "2^5" in low_scale(fell_to(5))
    assert low_scale(fell_to(8)) is None
    assert low_scale(fell_to(6, clean=19)) is None
    # A scale that somebody chose, and a scale that a run passed on its way up, are not low for overflows.
    assert low_scale([(64.0, False)] * 50) is None
    assert low_scale([*[(64.0, False)] * 50, *fell_to(12)]) is None


def test_a_low_scale_is_to_be_explained_and_not_started_at(tmp_path):
    file = record(tmp_path, [117.0] * 300)
    analysis = analyze(read_log(file))
    assert [advice.rule for advice in analysis.advice] == ["low scale"]
    assert analysis.scale_sense is None
    assert "adaptive-loss-scale why" in analysis.text()


def record(folder, losses, overflow_until=10):
    lines = [
        {"step": step, "loss": loss, "overflow": step <= overflow_until, "loss_scale": 2.0 ** max(16 - step, 6)}
        for step, loss in enumerate(losses, 1)
    ]
    file = folder / "loss_scale_record.jsonl"
    file.write_text("".join(json.dumps(line | {"next_loss_scale": line["loss_scale"]}) + "\n" for line in lines))
    return file


def test_analysis_says_the_signs(tmp_path):
    text = analyze(read_log(record(tmp_path, [4.2, 10402.0, *[100.0] * 60]))).text()
    for part in ("learning rate", "1.04e+04 in step 2", "above 2^6 overflowed"):
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

"""Test the messages about a collapsed loss scale and about the first bad loss of a run."""

import re

import pytest

from mindformers_adaptive.monitor.reports import BadLossDetector, CollapseDetector, way_to_the_cause


def step(consecutive_overflows, **entry):
    entry = {"step": 99, "loss": 2.5, "loss_scale": 8.0, "next_loss_scale": 4.0, **entry}
    return entry | {"consecutive_overflows": consecutive_overflows}


@pytest.mark.parametrize(
    ("rows", "told_at"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], [3, 6]),
        ([1, 2, 0, 1, 2, 0], []),
        ([2, 3, 0, 1, 2, 3], [3, 3]),
        # The detector sees overflows 1 and 2 of a series, and then overflow 7, because the run was stopped and resumed
        # within the series.
        ([2, 7, 8, 9], [7, 9]),
    ],
)
def test_a_row_is_told_at_each_multiple_of_the_limit(rows, told_at):
    detector = CollapseDetector(max_consecutive_overflows=3)
    assert [row for row in rows if detector.check(step(row))] == told_at


def test_the_whole_message_is_printed_once():
    detector = CollapseDetector(50, "Find the layer: ...")
    first, *later = (detector.check(step(row, step=row)) for row in (50, 100, 150))
    assert "Usual remedies" in first
    for row, line in zip((100, 150), later, strict=True):
        assert re.match(rf"Loss scaling has collapsed: {row} steps in a row", line)
        assert "remedies" not in line
        assert len(line) < 200


def test_without_a_limit_nothing_is_told():
    assert CollapseDetector(None).check(step(10**6)) is None


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"loss": float("nan")}, r"The loss itself is nan\b.* no loss scale can help: .* NaN or inf"),
        ({"loss_scale": 1.0, "next_loss_scale": 1.0}, r"The loss scale falls no .*\(min_loss_scale\)"),
        ({"loss_scale": 4.0}, r"The loss scale stays .* min_loss_scale, hysteresis or a fixed scale"),
        (
            {"loss_scale": 4.0, "gradient_format": "float16"},
            "The loss scale stays .*there, min_loss_scale or a fixed scale",
        ),
        ({}, r"The loss scale .*still falling: .* lower loss_scale_value "),
        ({"loss": None}, "The loss scale .*still falling"),
    ],
)
def test_the_message_says_where_and_what_helps(entry, sentence):
    message = CollapseDetector(2).check(step(2, **entry))
    scale = entry.get("loss_scale", 8.0)
    where = rf"collapsed: 2 steps .*overflowed up to step 99, .* at loss scale {re.escape(str(scale))}\."
    assert re.search(rf"{where} No weight has changed[^.]*\. {sentence}", message)
    for advice in ("learning rate", "softmax", "float32", "min_loss_scale", "from a checkpoint"):
        assert advice in message


def test_step_of_unknown_scale_is_told_with_the_next():
    message = CollapseDetector(2).check(step(2, loss_scale=None))
    assert "at loss scale 4.0." in message
    assert "still falling" in message
    assert "(min_loss_scale)" not in message


def test_the_first_bad_loss_is_told_once_and_at_once():
    detector = BadLossDetector(way_to_the_cause())
    assert [detector.check({"step": step, "loss": loss}) for step, loss in ((1, 2.5), (2, None))] == [None, None]
    message = detector.check({"step": 3, "loss": float("inf")})
    assert re.match(r"The loss of step 3 is inf, .*no loss scale can help\b", message)
    assert "adaptive-loss-scale why --config" in message
    assert "explain_overflow(train_step, batch)" in message
    assert detector.check({"step": 4, "loss": float("nan")}) is None
    assert re.search(r"inf in steps 3 to 4 only: .* batch \(", detector.check({"step": 5, "loss": 2.5}))
    assert [detector.check({"step": step, "loss": loss}) for step, loss in ((6, float("nan")), (7, 1.0))] == [None] * 2

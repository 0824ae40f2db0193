"""The package's own record: one JSON object a step, gaps, torn lines, and keys that are not known."""

import json

import pytest

from mindformers_adaptive.lab.logs import read_log
from mindformers_adaptive.monitor.record import RunRecord


def record(step, overflow=False, loss_scale=1024.0, **others):
    values = {"step": step, "loss": 2.5, "overflow": overflow, "loss_scale": loss_scale, "skipped_steps": 0}
    return json.dumps({**values, "next_loss_scale": loss_scale / (2 if overflow else 1), **others}) + "\n"


def read(tmp_path, *lines):
    (tmp_path / "loss_scale.jsonl").write_text("".join(lines), encoding="utf-8")
    return read_log(tmp_path / "loss_scale.jsonl")


def test_the_record_is_read_as_it_stands(tmp_path):
    run = read(tmp_path, record(1, True, 2048.0), record(2, novelty={"step": [1]}, overflowed_parameters="wq"))
    assert (run.log_format, run.step.tolist(), run.overflow.tolist()) == ("jsonl", [1, 2], [True, False])
    assert (run.loss_scale.tolist(), run.loss.tolist()) == ([2048.0, 1024.0], [2.5, 2.5])
    assert run.position_known.all()
    assert (run.notes, run.problems, run.seconds) == ((), (), None)
    assert (run.largest_gradient, run.overflowed_parameters) == (None, ())


@pytest.mark.parametrize(
    "torn",
    [
        '{"step": 2, "loss": 2.5, "overfl\n',
        '{"step": "2", "overflow": false, "loss_scale": 1.0}\n',
        '{"step": 2, "overflow": 0, "loss_scale": 1.0}\n',
        '{"step": 2, "overflow": false, "loss_scale": 0}\n',
        '{"step": 2, "overflow": false}\n',
        '{"step": -2, "overflow": false, "loss_scale": 1.0}\n',
        '{"step": 1' + "0" * 5000 + ', "overflow": false, "loss_scale": 1.0}\n',
    ],
)
def test_a_line_that_is_no_record_is_a_problem_with_its_place(tmp_path, torn):
    run = read(tmp_path, record(1), torn, record(3))
    assert (run.step.tolist(), run.lines_used, run.lines_ignored) == ([1, 3], 2, 1)
    assert len(run.problems) == 1
    assert "loss_scale.jsonl:2: looks like a step's record" in run.problems[0]


def test_numbers_that_json_has_no_sign_for_may_be_text_or_absent(tmp_path):
    text = '{"step": 1, "overflow": true, "loss_scale": "inf", "next_loss_scale": null, "loss": "nan"}\n'
    run = read(tmp_path, text)
    assert (run.loss_scale.tolist(), run.loss) == ([float("inf")], None)
    assert run.to_trace("lower_bound").upper_bound.tolist() == [float("inf")]


def test_largest_gradients_and_the_parameters_that_overflowed_are_read(tmp_path):
    lines = [
        record(1, True, 2048.0, largest_gradient="inf", overflowed_parameters=["wq", "wk"]),
        record(2, largest_gradient=0.5),
        record(3, largest_gradient=None),
    ]
    run = read(tmp_path, *lines)
    assert run.largest_gradient.tolist() == pytest.approx([float("inf"), 0.5, float("nan")], nan_ok=True)
    assert run.overflowed_parameters == (("wq", "wk"),)
    assert run.to_trace().largest_gradient.tolist() == pytest.approx([float("nan"), 0.5, float("nan")], nan_ok=True)
    # Steps that a restart repeats count once.
    again = [record(step, True, 64.0, overflowed_parameters=["wv"]) for step in (1, 2)]
    run = read(tmp_path, *lines, *map(record, range(4, 20)), *again)
    assert run.overflowed_parameters == (("wv",), ("wv",))
    assert run.largest_gradient is None


def test_what_was_null_is_inferred_from_the_scales_around_it(tmp_path):
    run = read(tmp_path, record(1), record(2, loss_scale=8.0, next_loss_scale=512.0).replace("8.0", "null"))
    assert run.loss_scale.tolist() == [1024.0, 512.0]
    run = read(tmp_path, record(1), record(2, next_loss_scale=512.0).replace("false", "null"))
    assert (run.overflow.tolist(), run.loss_scale.tolist()) == ([False, True], [1024.0, 1024.0])


def test_what_the_package_writes_is_read(tmp_path):
    written = RunRecord(tmp_path / "record.jsonl")
    written.resume(last_step=0)
    values = {"overflow": True, "loss_scale": float("inf"), "next_loss_scale": float("inf"), "loss": float("nan")}
    written.append([{"step": 1, **values}, {"step": 4, **values, "loss_scale": 8.0, "next_loss_scale": 4.0}])
    run = read_log(written.path)
    assert (run.step.tolist(), run.loss_scale.tolist(), run.problems) == ([1, 4], [float("inf"), 8.0], ())
    assert [note for note in run.notes if "record.jsonl:2: 2 step(s) were not recorded (2 to 3)" in note]

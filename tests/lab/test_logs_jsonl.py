"""The package's own record: one JSON object a step, gaps, torn lines, and keys that are not known."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindformers_adaptive.lab.logs import read_log
from mindformers_adaptive.lab.logs import record as record_module
from mindformers_adaptive.lab.logs.record import JsonlReader
from mindformers_adaptive.lab.policies import make_policy
from mindformers_adaptive.record.step import FIELDS
from mindformers_adaptive.record.writer import RunRecord
from mindformers_adaptive.text.files import json_text
from tests.shared.records import missing


def record(step, overflow=False, loss_scale=1024.0, **others):
    values = {"step": step, "loss": 2.5, "overflow": overflow, "loss_scale": loss_scale, "skipped_steps": None}
    return json.dumps({**values, "next_loss_scale": loss_scale / (2 if overflow else 1), **others}) + "\n"


def read(tmp_path, *lines):
    (tmp_path / "loss_scale.jsonl").write_text("".join(lines), encoding="utf-8")
    return read_log(tmp_path / "loss_scale.jsonl")


def test_the_record_is_read_as_it_stands(tmp_path):
    run = read(tmp_path, record(1, True, 2048.0), record(2, novelty={"step": [1]}))
    assert (run.log_format, run.step.tolist(), run.overflow.tolist()) == ("jsonl", [1, 2], [True, False])
    assert (run.loss_scale.tolist(), run.loss.tolist()) == ([2048.0, 1024.0], [2.5, 2.5])
    assert run.position_known.all()
    assert (run.notes, run.problems, run.seconds) == ((), (), None)
    assert run.largest_gradient is None


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
    assert "loss_scale.jsonl:2: looks like a step's line" in run.problems[0]


@pytest.mark.parametrize("told", [(-3, 5, 1), (3, 2, 3), ("3", 2, 4), (2, 2, None), (10**20, None, None)])
def test_a_line_that_counts_no_missing_steps_is_a_problem_with_its_place(tmp_path, told):
    gap = dict(zip(("missing_steps", "first_step", "last_step"), told, strict=True))
    run = read(tmp_path, record(1), json.dumps(gap) + "\n", record(5))
    assert len(run.problems) == 1
    assert "loss_scale.jsonl:2: looks like a line for steps that were not recorded, but does not" in run.problems[0]
    assert not any("not recorded" in note for note in run.notes)


def test_numbers_that_json_has_no_sign_for_may_be_text_or_absent(tmp_path):
    text = '{"step": 1, "overflow": true, "loss_scale": "inf", "next_loss_scale": null, "loss": "nan"}\n'
    run = read(tmp_path, text)
    # A loss that was NaN is not one that nobody knows.
    assert (run.loss_scale.tolist(), run.loss.tolist()) == ([float("inf")], [float("inf")])
    assert run.to_trace("lower_bound").upper_bound.tolist() == [float("inf")]


@pytest.mark.parametrize("is_own", [True, False])
def test_norms_of_the_gradients_and_losses_are_read(tmp_path, is_own):
    lines = []
    for step, norm in enumerate((0.5, math.nan, None), start=1):
        values = dict.fromkeys(FIELDS) | {"step": step, "loss": norm, "overflow": False, "dropped_by_norm": False}
        values |= {"loss_scale": 8.0, "next_loss_scale": 8.0, "gradient_norm": norm}
        # Another order of the keys is left to the parser of JSON.
        lines.append(json_text(values if is_own else dict(reversed(values.items()))) + "\n")
    run = read(tmp_path, *lines)
    np.testing.assert_array_equal(run.gradient_norm, [0.5, np.nan, np.nan])
    # A loss that was NaN is not one that nobody knows.
    np.testing.assert_array_equal(run.loss, [0.5, np.inf, np.nan])


def test_largest_gradients_are_read(tmp_path):
    lines = [
        record(1, True, 2048.0, largest_gradient="inf"),
        record(2, largest_gradient=0.5),
        record(3, largest_gradient=None),
    ]
    run = read(tmp_path, *lines)
    assert run.largest_gradient.tolist() == pytest.approx([float("inf"), 0.5, float("nan")], nan_ok=True)
    assert run.to_trace().largest_gradient.tolist() == pytest.approx([float("nan"), 0.5, float("nan")], nan_ok=True)
    # Steps that a restart repeats count once.
    again = [record(step, True, 64.0) for step in (1, 2)]
    run = read(tmp_path, *lines, *map(record, range(4, 20)), *again)
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
    assert (run.step.tolist(), run.without_line.tolist()) == ([1, 2, 3, 4], [False, True, True, False])
    assert (run.loss_scale[[0, 3]].tolist(), run.problems) == ([float("inf"), 8.0], ())
    # Nothing counted what was skipped in between.
    assert run.skipped_bounds() == (2, 4)
    assert [note for note in run.notes if "record.jsonl:2: 2 step(s) were not recorded (2 to 3)" in note]


def steps_of(rule, flags, start=2.0**16, gradients=None):
    """The lines of every step that a rule takes with these flags."""
    state, lines = rule.start(start), []
    for step, overflow in enumerate(flags, start=1):
        before, gradient = state.loss_scale, None if gradients is None else gradients[step - 1]
        state = rule.step(state, overflow, gradient)
        after = {"next_loss_scale": state.loss_scale, **state._asdict(), "largest_gradient": gradient}
        known = {name: after.get(name) for name in FIELDS}
        lines.append({**known, "step": step, "loss": 2.5, "overflow": overflow, "loss_scale": before})
    return lines


def with_gaps(lines, every, history):
    """What is left where the host looks at every so many steps, and the device keeps the last few of them."""
    kept = []
    for last in range(every, len(lines) + 1, every):
        first = last - max(history, 1)
        if first > last - every:
            kept.append(missing(last - every + 1, first))
        seen = lines[first:last]
        kept += seen if history else [{**seen[0], "loss_scale": None}]
    return kept


def write_lines(path, lines):
    path.write_text("".join(json_text(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("history", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "arguments"), [("adaptive", {"min_scale_window": 5}), ("guided", {}), ("adaptive", {"hysteresis": 2})]
)
def test_a_record_of_every_seventh_step_counts_them_all(tmp_path, name, arguments, history):
    rule, random = make_policy(name, **arguments).rule, np.random.default_rng(history)
    flags = (random.random(700) < 0.07).tolist()
    lines = steps_of(rule, flags, gradients=[None if flag else 2.0**-5 for flag in flags])
    run = read_log(write_lines(tmp_path / "record.jsonl", with_gaps(lines, 7, history)))
    assert (run.step.tolist(), run.skipped_steps) == (list(range(1, 701)), sum(flags))
    assert (run.skipped_bounds(), run.holds_if) == ((sum(flags),) * 2, "")
    counts = [(sum(flags[:end]),) * 2 for end in range(7, 701, 7)]
    assert [run.skipped_bounds(end) for end in range(7, 701, 7)] == counts
    told = run.position_known
    assert (run.overflow[told] == np.array(flags)[told]).all()
    assert told[6::7].all()
    # With the rule of the run, what the lines count stays as it is.
    if name == "adaptive":
        policy = make_policy(name, **arguments, loss_scale_value=2.0**16)
        assert read_log(tmp_path / "record.jsonl", rule=policy).skipped_bounds() == (sum(flags),) * 2


def test_seconds_that_no_step_can_have_taken_are_unknown(tmp_path):
    line, seconds = steps_of(make_policy("adaptive").rule, [True] * 4), [-4, math.inf, "long", 2.5]
    lines = [{**one, "seconds": took} for one, took in zip(line, seconds, strict=True)]
    run = read_log(write_lines(tmp_path / "record.jsonl", lines))
    assert (np.isnan(run.seconds).tolist(), run.seconds[3]) == ([True, True, True, False], 2.5)


def test_of_several_formats_the_first_is_taken_and_named(tmp_path):
    lines = steps_of(make_policy("adaptive").rule, [False] * 4)
    formats = [None, "bfloat16", "bfloat16", "float16"]
    lines = [{**line, "gradient_format": given} for line, given in zip(lines, formats, strict=True)]
    run = read_log(write_lines(tmp_path / "record.jsonl", lines[:3]))
    assert (run.gradient_format.name, run.notes) == ("bfloat16", ())
    run = read_log(write_lines(tmp_path / "record.jsonl", lines))
    assert run.gradient_format.name == "bfloat16"
    assert "several formats of gradients, bfloat16, float16: the first one is taken for all" in run.notes[0]


@pytest.mark.parametrize("wrong", ["float17", {"largest": 2}, [16]])
def test_a_format_that_is_none_is_refused_with_its_place(tmp_path, wrong):
    with pytest.raises(ValueError, match=r"loss_scale\.jsonl:2: 'gradient_format' must"):
        read(tmp_path, record(1), record(2, gradient_format=wrong))


def test_a_flag_that_no_line_names_is_told_by_the_counts(tmp_path):
    flags = (np.random.default_rng(0).random(100) < 0.3).tolist()
    lines = [{**line, "overflow": None} for line in steps_of(make_policy("adaptive").rule, flags)]
    for unknown in ({}, {"loss_scale": None}):
        run = read_log(write_lines(tmp_path / "record.jsonl", [{**line, **unknown} for line in lines]))
        assert (run.overflow.tolist(), run.skipped_bounds(), run.holds_if) == (flags, (sum(flags),) * 2, "")


def test_a_gap_that_nothing_counts_has_bounds(tmp_path):
    lines = with_gaps(steps_of(make_policy("adaptive").rule, [False] * 20 + [True] + [False] * 7), 7, 1)
    run = read_log(write_lines(tmp_path / "record.jsonl", [{**one, "skipped_steps": None} for one in lines]))
    # The fall shows a skip; other steps may have been skipped too.
    assert (len(run), run.skipped_bounds(21)[0]) == (28, 1)
    assert run.skipped_bounds()[1] > 1
    assert "one factor" in run.holds_if


@pytest.mark.parametrize(
    ("counts", "bounds"),
    [
        # A counter that went back, one that has more than there were steps, and one that lacks what the flag shows.
        ((5, 2), (1, 5)),
        ((0, 9), (1, 5)),
        ((3, 3), (1, 5)),
        ((0, 3), (3, 3)),
    ],
)
def test_a_count_that_cannot_be_is_not_relied_on(tmp_path, counts, bounds):
    line = steps_of(make_policy("adaptive").rule, [True])[0] | {"loss_scale": 8.0, "next_loss_scale": 8.0}
    first, last = ({**line, "step": step, "skipped_steps": count} for step, count in zip((1, 6), counts, strict=True))
    lines = [{**first, "overflow": False}, missing(2, 5), last]
    run = read_log(write_lines(tmp_path / "record.jsonl", lines))
    assert (len(run), run.skipped_bounds()) == (6, bounds)


def test_a_record_that_begins_at_a_resume_and_one_that_ends_in_a_gap(tmp_path):
    line = steps_of(make_policy("adaptive").rule, [False])[0]
    late = [missing(101, 106), {**line, "step": 107, "skipped_steps": 12}]
    run = read_log(write_lines(tmp_path / "record.jsonl", late))
    # How many of the six were skipped is not known, for nobody knows the count before them.
    assert (run.step.tolist(), run.skipped_bounds()) == (list(range(101, 108)), (0, 6))
    run = read_log(write_lines(tmp_path / "record.jsonl", [line, missing(2, 4)]))
    assert (run.step.tolist(), run.skipped_bounds()) == ([1, 2, 3, 4], (0, 3))


def test_a_gap_of_any_length_is_counted_and_no_number_fills_the_memory(tmp_path):
    first, last = steps_of(make_policy("adaptive").rule, [False, True])
    for step, length in ((50_000, 50_000), (2**50, 2)):
        lines = [first, missing(2, step - 1), {**last, "step": step, "skipped_steps": 300}]
        run = read_log(write_lines(tmp_path / "record.jsonl", lines))
        assert (len(run), run.skipped_steps) == (length, 300 if length > 2 else 1)


def test_of_gaps_that_are_more_than_any_training_the_first_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(record_module, "_MOST_STEPS", 25_000)
    line, lines, last = steps_of(make_policy("adaptive").rule, [False])[0], [], 0
    for step in (1, 15_002, 27_003):
        lines += [{**line, "step": step}] if step == 1 else [missing(last + 1, step - 1), {**line, "step": step}]
        last = step
    run = read_log(write_lines(tmp_path / "record.jsonl", lines))
    assert (len(run), run.step[-2:].tolist()) == (15_003, [15_002, 27_003])


def test_steps_that_nothing_tells_of_are_named(tmp_path):
    run = read(tmp_path, record(1), record(2), record(5, next_loss_scale=2048.0), record(6, loss_scale=2048.0))
    assert run.step.tolist() == [1, 2, 5, 6]
    [note] = run.notes
    assert "2 step(s) before this line, 3 to 4, are not in the log" in note


def test_after_a_restart_notes_name_the_file_that_a_line_is_in(tmp_path):
    rule = make_policy("adaptive").rule
    attempt, later = (
        [{**line, "skipped_steps": None} for line in steps_of(rule, [False] * 9, start)] for start in (8.0, 4.0)
    )
    first = write_lines(tmp_path / "a.jsonl", attempt[:5])
    second = write_lines(tmp_path / "b.jsonl", [*attempt[5:7], later[3], *later[7:]])
    [gap] = [note for note in read_log([first, second]).notes if "are not in the log" in note]
    assert gap.startswith(f"{second}:4: 3 step(s) before this line, 5 to 7,")


def test_after_a_restart_neither_gaps_nor_counts_of_before_are_relied_on(tmp_path):
    line = steps_of(make_policy("adaptive").rule, [False])[0]
    uncounted = {**line, "skipped_steps": None}
    before = [uncounted, missing(2, 5), {**uncounted, "step": 6}]
    run = read_log(write_lines(tmp_path / "record.jsonl", [*before, {**uncounted, "overflow": True}, before[-1]]))
    # What lies between was not taken, or has no line for another reason.
    assert run.step.tolist() == [1, 6]
    steps = [{**line, "step": step, "overflow": None, "skipped_steps": step // 3} for step in (1, 2, 3)]
    run = read_log(
        write_lines(tmp_path / "record.jsonl", [*steps, {**steps[1], "loss_scale": 8.0, "skipped_steps": 1}])
    )
    assert (run.step.tolist(), run.position_known.tolist()) == ([1, 2], [True, False])


VALUES = st.one_of(
    st.none(), st.floats(), st.sampled_from(["nan", "inf", "-inf", "0", ""]), st.integers(-5, 10**20), st.booleans()
)
SCALES = st.sampled_from([2.0**16, 1.0, 3.4e38, 0.0, None, math.inf, -1.0, 4e38, 1e-46, 65536])


@st.composite
def own_lines(draw):
    """A line with the keys in the order of the package, with values that it writes, or others."""
    line = {name: draw(VALUES) for name in FIELDS if draw(st.integers(0, 20))}
    line |= {"step": draw(st.integers(0, 30)), "overflow": draw(st.sampled_from([True, False, None]))}
    line |= {name: draw(SCALES) for name in ("loss_scale", "next_loss_scale")}
    line |= {"skipped_steps": draw(st.integers(0, 30) | st.none())}
    line |= {"scale_window": draw(st.integers(0, 100) | st.none())}
    line = {name: line[name] for name in FIELDS if name in line}
    extra = {"mean": 2.5, "gradient_format": "bfloat16", "note": ["w"], "seconds": 0.5}
    return line | {name: extra[name] for name in draw(st.lists(st.sampled_from(sorted(extra)), unique=True))}


@settings(max_examples=300)
@given(st.lists(own_lines(), min_size=1, max_size=8))
def test_the_quick_way_and_the_parser_of_json_read_the_same(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "own.jsonl"
    try:
        quick = read_log(write_lines(path, lines), "jsonl")
    except ValueError as error:
        quick = str(error)
    # In another order of keys, no line is one that the package writes.
    others = [dict(sorted(line.items(), reverse=True)) for line in lines]
    try:
        parsed = read_log(write_lines(path, others), "jsonl")
    except ValueError as error:
        parsed = str(error)
    assert type(quick) is type(parsed)
    if isinstance(quick, str):
        assert quick == parsed
        return
    for field in dataclasses.fields(quick):
        one, other = getattr(quick, field.name), getattr(parsed, field.name)
        assert str(one) == str(other), field.name


def test_what_the_monitor_writes_goes_the_quick_way(monkeypatch, tmp_path):
    lines = steps_of(make_policy("adaptive").rule, [True, False] * 3)
    lines += [{**line, "step": line["step"] + 6, "gradient_format": "float16"} for line in lines]
    path = write_lines(tmp_path / "record.jsonl", [{"run": 7, **lines[0]}, *lines[1:]])
    monkeypatch.setattr("mindformers_adaptive.lab.logs.record.json_object", pytest.fail)
    monkeypatch.setattr(JsonlReader, "is_step_line", lambda text: True)
    assert len(read_log(path)) == 12

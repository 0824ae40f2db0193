"""The analysis of runs that are made by hand or read from sample logs, and replays of other rules on these runs."""

import itertools
import json
import re

import numpy as np
import pytest

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.lab.scale_path import changes_of
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.run import RecordedRun
from tests.conftest import ROOT
from tests.shared.records import run_of

LOGS = ROOT / "tests" / "record" / "samples"


def test_everything_of_a_small_run_is_told():
    run = run_of([8, 4, 2, 2, 4, 2], [1, 1, 0, 0, 1, 0])
    analysis = analyze(run).to_dict()
    assert analysis["steps"] == {"count": 6, "first": 1, "last": 6}
    assert analysis["skipped"] == {
        "count": 3,
        "at_least": 3,
        "at_most": 3,
        "ranges": [(1, 2), (5, 5)],
    }
    phases_found = analysis["loss_scale"].pop("phases")
    assert analysis["loss_scale"] == {
        **{"first": 8.0, "final": None, "last_stated": 2.0, "smallest": 2.0, "largest": 8.0},
        **{"first_at_least": 8.0, "first_at_most": 8.0, "stayed": False, "settled": None, "halvings_at_least": 3},
    }
    assert [(row["kind"], row["first_step"], row["last_step"], row["windows"]) for row in phases_found] == [
        ("drop", 1, 2, ()),
        ("raise", 4, 4, ()),
        ("drop", 5, 5, ()),
    ]


def test_skipped_steps_before_a_scale_held_are_counted():
    overflow = [True] * 3 + [False] * 90 + [True] * 20
    start_up = analyze(run_of([4.0] * 113, overflow)).to_dict()["start_up"]
    expected = {"before_scale_held": 3}
    bounds = {f"{name}_at_{end}": count for name, count in expected.items() for end in ("least", "most")}
    held = {"a_scale_held": True, "held_scale": None, "held_from_step": None, "highest_held": 4.0}
    assert start_up == {**held, **expected, **bounds}


def stretches(*rows, **attributes):
    """Return a run from rows of the first and last step, the fewest and most skipped steps, and the scale after."""
    first, last, fewest, most, after = map(np.array, zip(*rows, strict=True))
    unknown = np.where(first == last, np.append(np.nan, after[:-1]), np.nan)
    return RecordedRun("run", (), "jsonl", first, last, fewest, most, unknown, after.astype(float), **attributes)


@pytest.mark.parametrize(
    ("rows", "held"),
    [
        # 20 steps in a row without overflow, in one stretch or over several.
        ([(1, 20, 0, 0, 8)], True),
        ([(1, 15, 0, 0, 8), (16, 20, 0, 0, 8)], True),
        ([(1, 19, 0, 0, 8)], False),
        # One of 41 skipped steps leaves 20 in a row, wherever it is.
        ([(1, 41, 1, 1, 8)], True),
        ([(1, 40, 1, 1, 8)], None),
        ([(1, 20, 1, 1, 8)], False),
        # Which steps were skipped is not stated.
        ([(1, 10, 0, 0, 8), (11, 20, 0, 10, 8)], None),
        ([(1, 10, 0, 0, 8), (11, 19, 0, 9, 8)], False),
        # Between two stretches steps are missing.
        ([(1, 15, 0, 0, 8), (17, 30, 0, 0, 8)], None),
        ([(1, 10, 1, 1, 8), (11, 20, 0, 0, 8), (21, 30, 1, 1, 8)], None),
    ],
)
def test_whether_a_scale_held_has_three_answers(rows, held):
    analysis = analyze(stretches(*rows))
    assert analysis.to_dict()["start_up"]["a_scale_held"] is held
    assert ("does not show whether" in analysis.text()) == (held is None)


def test_a_scale_that_jumps_is_neither_dropped_nor_raised():
    scale, step = np.array([4.0, 64.0, 32.0, 64.0, 128.0, 16.0]), np.array([1, 2, 3, 4, 9, 10])
    following = {"next_loss_scale": np.array([4.0, 32.0, 64.0, 64.0, 64.0, 16.0])}
    overflow = np.array([False, True, False, False, True, False])
    run = RecordedRun.of_steps(step, scale, overflow, columns=following)
    assert [change.kind for change in changes_of(run)] == ["jump", "drop", "raise", "jump", "drop", "jump"]


def test_scales_that_a_log_has_rounded_do_not_jump():
    changes = changes_of(run_of([131100, 65540, 65540, 131100], [1, 0, 0, 0]))
    assert [change.kind for change in changes] == ["drop", "raise"]


def path_of(tmp_path, rows):
    """Write a run record; return the rows of the table of loss-scale changes that the analysis prints for this record.

    Each row gives a step's number, overflow flag, loss scale, next loss scale and, optionally, scale window.
    """
    fields = ("step", "overflow", "loss_scale", "next_loss_scale", "scale_window")
    lines = [json.dumps(dict(zip(fields, row, strict=False))) for row in rows]
    (tmp_path / "run.jsonl").write_text("\n".join(lines))
    text = analyze(read_log(tmp_path / "run.jsonl")).text(details=True)
    lines = next(part for part in text.split("\n\n") if "what the loss scale did" in part).splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


def test_the_path_of_a_record_has_its_windows(tmp_path):
    rows = [(1, True, 1024, 512, 20), (2, False, 512, 1024, 20), (3, False, 1024, 2048, 30), (4, False, 2048, 2048, 30)]
    rows.append((5, True, 2048, 1024, 1))
    assert path_of(tmp_path, rows) == [
        ["steps", "what the loss scale did", "loss scale", "window"],
        ["1", "1 drop", "2^10 -> 2^9", "20"],
        ["2-3", "2 raises", "2^9 -> 2^11", "20 -> 30"],
        ["5", "1 drop", "2^11 -> 2^10", "30 -> 1"],
    ]


def test_steps_of_a_record_are_no_jump_whatever_the_rule(tmp_path):
    rows = [(1, True, 1024, 4), (2, False, 4, 64), (3, False, 64, 32), (4, True, 32, 64), (5, True, 64, 64)]
    # The run restarts at another loss scale at step 6, and again at step 10. The record lacks steps 7 and 8.
    rows += [(6, False, 256, 256), (9, False, 256, 512), (10, False, 1024, 1024)]
    heading, *path = path_of(tmp_path, rows)
    assert heading == ["steps", "what the loss scale did", "loss scale"]
    assert path[:6] == [
        ["1", "1 drop", "2^10 -> 2^2"],
        ["2", "1 raise", "2^2 -> 2^6"],
        ["3", "fell at 1 applied step", "2^6 -> 2^5"],
        ["4", "rose at 1 overflow", "2^5 -> 2^6"],
        ["5", "1 jump", "2^6 -> 2^8"],
        ["9", "1 raise", "2^8 -> 2^9"],
    ]
    assert path[6] == ["9", "1 jump", "2^9 -> 2^10"]
    note = " ".join(row[0] for row in path[7:])
    assert note.startswith("A jump is ")
    assert "restarted" in note


def test_problems_of_a_log_are_shown_with_their_line(tmp_path):
    log = tmp_path / "run.jsonl"
    log.write_text('{"step": 1, "overflow": false, "loss_scale": 8}\n{"step": 2, "overflow": fal\n')
    analysis = analyze(read_log(log))
    assert f"{log}:2: looks like a step's line" in analysis.text(details=True)
    assert re.search(r"\b1 line .*not be read.*--details", analysis.text())
    assert (analysis.to_dict()["log"]["lines_used"], analysis.to_dict()["log"]["lines_ignored"]) == (1, 1)


def test_long_lists_are_cut_in_the_text_only():
    overflow = np.arange(400) % 4 == 3
    analysis = analyze(run_of(np.where(overflow, 8.0, 4.0), overflow))
    text = analysis.text(details=True)
    assert "and 80 more" in text.replace("\n" + " " * 10, " ")
    assert len(text.splitlines()) < 75
    assert "... 169 rows ..." in text
    assert len(analysis.to_dict()["skipped"]["ranges"]) == 100
    assert len(analysis.to_dict()["loss_scale"]["phases"]) == 199


@pytest.mark.parametrize("scale", [[np.inf] * 40, [np.nan, 4.0] * 20, [2.0**-149] * 40])
def test_scales_that_are_no_usual_numbers_are_analyzed(scale):
    analysis = analyze(run_of(scale, [True] * 20 + [False] * 20))
    json.dumps(analysis.to_dict(), allow_nan=False)
    assert analysis.text(details=True)


def test_a_change_by_more_than_float32_is_analyzed(tmp_path):
    lines = [
        {"step": step, "overflow": step % 3 == 0, "loss_scale": used, "next_loss_scale": after}
        for step, (used, after) in enumerate(itertools.pairwise([2.0**14, 2.0**14, 1e-44] * 20), start=1)
    ]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert analyze(read_log(tmp_path / "run.jsonl")).to_dict()["skipped"]["count"] == 19


def test_a_run_without_steps_or_scales_is_refused():
    with pytest.raises(ValueError, match="at least 1 step"):
        analyze(run_of([], []))
    with pytest.raises(ValueError, match="known loss scale"):
        analyze(run_of([np.nan], [False]))

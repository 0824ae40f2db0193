"""The errors of Parameters, one by one, and the command that compares two files."""

import json
import math
from pathlib import Path

import mindspore
import numpy as np
import pytest
from drawn import points, title
from mindspore import Tensor
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.difference import compare_arrays
from mindformers_adaptive.mindformers.checkpoint_arrays import by_step, save_arrays
from mindformers_adaptive.plots.differences import draw_differences

REFERENCE = {
    "model.layers.0.wq.weight": np.array([[3.0, 0.0], [0.0, 4.0]], np.float32),
    "model.layers.1.wq.weight": np.array([1.0, 1.0], np.float32),
    "lm_head.weight": np.zeros(3, np.float32),
}
OTHER = {
    "model.layers.0.wq.weight": np.array([[3.0, 0.0], [0.0, 3.5]], np.float32),
    "model.layers.1.wq.weight": np.array([1.0, 1.0], np.float32),
    "lm_head.weight": np.array([0.0, 2.0**-20, 0.0], np.float32),
}


def test_errors_are_those_of_the_arrays_the_worst_first():
    found = {one.name: one for one in compare_arrays(OTHER, REFERENCE)}
    assert [*found] == ["lm_head.weight", "model.layers.0.wq.weight", "model.layers.1.wq.weight"]
    assert (found["lm_head.weight"].relative_error, found["lm_head.weight"].largest_error) == (math.inf, 2.0**-20)
    assert found["model.layers.0.wq.weight"][1:6] == (4, np.hypot(3, 3.5), 5.0, 0.1, 0.5)
    assert found["model.layers.1.wq.weight"].relative_error == 0


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_not_finite_comes_first(place):
    pair = [dict(REFERENCE), dict(OTHER)]
    pair[place] |= {"model.layers.1.wq.weight": np.array([np.inf, np.nan], np.float32)}
    worst = compare_arrays(*pair)[0]
    assert worst.name == "model.layers.1.wq.weight"
    assert math.isnan(worst.relative_error)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.ones(2)}, "none of the first .other. is in the second .model.layers.0.wq.weight, "),
        ({"lm_head.weight": np.ones(2)}, r"'lm_head.weight' must have one shape, but has \(2,\) and \(3,\)"),
    ],
)
def test_what_cannot_be_compared_is_refused(arrays, message):
    with pytest.raises(ValueError, match=message):
        compare_arrays(arrays, REFERENCE)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two checkpoints of different formats, of steps 4 and 6; the first has one Parameter and a counter more."""
    monkeypatch.chdir(tmp_path)
    more = {**OTHER, "bias": np.ones(1, np.float32), "scale_window": np.array(20, np.int32)}
    saved = [{"name": name, "data": Tensor(array)} for name, array in more.items()]
    mindspore.save_checkpoint(saved, "run-1_4.ckpt", append_dict={"step_num": 4})
    half = [{"name": "half", "data": Tensor([1.0], mstype.bfloat16)}]
    mindspore.save_checkpoint(half, "half.ckpt")
    save_arrays("run-1_6.safetensors", REFERENCE)
    return "run-1_4.ckpt", "run-1_6.safetensors"


def test_the_command_shows_the_error_of_each_parameter(files, run_program):
    code, printed, _ = run_program("diff", *files)
    rows = printed.splitlines()
    assert code == 0
    assert [row.split()[0] for row in rows[1:4]] == [*OTHER][2:] + [*OTHER][:2]
    assert rows[2].split()[1:] == ["4", "4.61", "5", "1.00e-01", "5.00e-01"]
    assert rows[4:] == [
        "",
        "1 of 3 Parameters are equal.",
        "The steps differ: 4 and 6.",
        "Only in run-1_4.ckpt: 1, such as bias.",
    ]
    shown = run_program("diff", *files, "--modules", "model", "--worst", 1)[1].splitlines()
    assert [row.split()[0] for row in shown if row] == ["elements", "model.layers.0.wq.weight", "1", "The"]
    content = json.loads(run_program("diff", *files, "--json")[1])
    assert (content["step"], content["reference_step"], content["parameters"][1]["relative_error"]) == (4, 6, 0.1)
    assert content["parameters"][0]["relative_error"] == "inf"


def test_a_file_is_equal_to_itself_also_in_bfloat16(files, run_program):
    for file in (files[0], "half.ckpt"):
        assert "Parameters are equal." in run_program("diff", file, file)[1]
        assert " 0.00e+00" in run_program("diff", file, file)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["half.ckpt", "missing.ckpt"], "missing.ckpt"),
        (["half.ckpt", "run-1_4.ckpt"], "none of the first (half) is in the second"),
        (["half.ckpt", "half.ckpt", "--modules", "hal"], "'hal' is not. The nearest names are half"),
    ],
)
def test_what_the_command_cannot_compare_is_said(files, run_program, arguments, message):
    code, _, errors = run_program("diff", *arguments)
    assert (code, message in errors) == (1, True)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two folders of checkpoints, equal at step 2 and apart at 4 and 6; each has one step more."""
    monkeypatch.chdir(tmp_path)
    for folder, factor, others in (("a", 1.0, (1,)), ("b", 2.0, (8,))):
        (tmp_path / folder).mkdir()
        for step in (2, 4, 6, *others):
            grown = factor if step > 2 else 1.0
            arrays = {"norm.gamma": np.ones(4, np.float32), "attention.wq": np.full(4, step * grown, np.float32)}
            save_arrays(f"{folder}/run-1_{step}.safetensors", arrays)
    return "a", "b"


def test_two_series_are_compared_step_by_step(folders, run_program):
    code, printed, _ = run_program("diff", *folders, "--series", "--plot", "parting.svg")
    heading, *rows, _, parts, left = printed.splitlines()
    assert code == 0
    assert heading.split() == ["step", "attention", "norm", "all", "worst", "its", "error"]
    assert [row.split()[:3] for row in rows] == [
        ["2", "0.00e+00", "0.00e+00"],
        ["4", "5.00e-01", "0.00e+00"],
        ["6", "5.00e-01", "0.00e+00"],
    ]
    assert parts.startswith("They are equal up to step 2, apart from step 4 on, in 1 of 2 Parameters, ")
    assert left == "2 checkpoint(s) are of steps that only one folder has."
    assert Path("parting.svg").read_text().startswith("<?xml")
    content = json.loads(run_program("diff", *folders, "--series", "--json", "--modules", "norm")[1])
    assert (content["steps"], content["relative_error"]) == ([2, 4, 6], {"norm": [0.0] * 3, "all": [0.0] * 3})


def test_of_a_step_that_several_ranks_have_saved_the_first_is_compared(tmp_path):
    for rank in (10, 2, 0):
        (folder := tmp_path / f"rank_{rank}").mkdir()
        save_arrays(folder / "net-1_8.safetensors", REFERENCE)
    assert {step: path.parent.name for step, path in by_step(tmp_path).items()} == {8: "rank_0"}


def test_two_series_are_drawn_with_a_line_for_each_group():
    steps = {step: compare_arrays({"a.wq": np.full(2, 1.0 + step)}, {"a.wq": np.ones(2)}) for step in (0, 1, 2)}
    [axes] = (figure := draw_differences(steps, lambda name: name)).axes
    assert points(axes, "a.wq") == ([0, 1, 2], [0.0, 1.0, 2.0])
    assert title(figure).startswith("They are equal up to step 0, apart from step 1 on, in 1 of 1 Parameters")
    [axes] = draw_differences({1: steps[0]}).axes
    assert points(axes, "all") == ([1], [0.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "a/none", "--series"], "none"),
        (["a", "empty", "--series"], "must hold checkpoints whose steps are known"),
        (["a", "other", "--series"], "must have checkpoints of the same steps, but a has 1, 2, 4, 6 and other 9."),
        (["a", "b", "--plot", "out.svg"], "argument --plot is for --series"),
        (["a", "b", "--series", "--worst", "3"], "argument --worst is for two checkpoints"),
    ],
)
def test_series_that_cannot_be_compared_are_refused(folders, run_program, arguments, message):
    for folder in ("empty", "other"):
        Path(folder).mkdir()
    save_arrays("other/run-1_9.safetensors", REFERENCE)
    code, _, errors = run_program("diff", *arguments)
    assert (code > 0, message in errors) == (True, True)

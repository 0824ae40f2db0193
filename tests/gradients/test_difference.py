"""The function and the command that compare two checkpoints or gradient files return the error of each Parameter."""

import json
import math

import mindspore
import numpy as np
import pytest
from mindspore import Tensor
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.difference import compare_arrays, drift_step
from mindformers_adaptive.mindformers.checkpoint_arrays import save_arrays

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
    differences = {difference.name: difference for difference in compare_arrays(OTHER, REFERENCE)}
    assert [*differences] == ["lm_head.weight", "model.layers.0.wq.weight", "model.layers.1.wq.weight"]
    assert (differences["lm_head.weight"].relative_error, differences["lm_head.weight"].largest_error) == (
        math.inf,
        2.0**-20,
    )
    assert differences["model.layers.0.wq.weight"][1:6] == (4, np.hypot(3, 3.5), 5.0, 0.1, 0.5)
    assert differences["model.layers.1.wq.weight"].relative_error == 0


@pytest.mark.parametrize("number", [0, 1])
def test_what_is_not_finite_comes_first(number):
    pair = [dict(REFERENCE), dict(OTHER)]
    pair[number] |= {"model.layers.1.wq.weight": np.array([np.inf, np.nan], np.float32)}
    worst = compare_arrays(*pair)[0]
    assert worst.name == "model.layers.1.wq.weight"
    assert math.isnan(worst.relative_error)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.ones(2)}, "no name of the first .other. is in the second .model.layers.0.wq.weight, "),
        ({"lm_head.weight": np.ones(2)}, r"'lm_head.weight' must have the same shape .*, but has \(2,\) and \(3,\)"),
    ],
)
def test_what_cannot_be_compared_is_refused(arrays, message):
    with pytest.raises(ValueError, match=message):
        compare_arrays(arrays, REFERENCE)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Return checkpoints of steps 4 and 6 in different formats; the first has an extra Parameter and a counter."""
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
    [verdict, _, *rows] = printed.splitlines()
    assert code == 0
    assert verdict.startswith("2 of 3 Parameters differ.")
    assert [row.split()[0] for row in rows[1:4]] == [*OTHER][2:] + [*OTHER][:2]
    assert rows[2].split()[1:] == ["4", "1.00e-01", "5.00e-01"]
    assert rows[7:] == [
        "The steps differ: 4 and 6.",
        "Only in run-1_4.ckpt: 1, such as bias.",
    ]
    shown = run_program("diff", *files, "--modules", "model", "--worst", 1)[1].splitlines()
    assert [row.split()[0] for row in shown if row][1:3] == ["Parameter", "model.layers.0.wq.weight"]
    content = json.loads(run_program("diff", *files, "--json")[1])
    assert (content["step"], content["reference_step"], content["parameters"][1]["relative_error"]) == (4, 6, 0.1)
    assert content["parameters"][0]["relative_error"] == "inf"


def test_rows_with_the_longest_names_of_mindformers_fit(tmp_path, run_program):
    name = "model.decoder.layers.60.self_attention.linear_kv_up_proj.weight"
    for folder, error in (("one", 0.5), ("other", 0.0)):
        for step in (100_000, 200_000):
            file = tmp_path / folder / f"run-1_{step}.safetensors"
            file.parent.mkdir(exist_ok=True)
            save_arrays(file, {name: np.float32([1.0 + error] * 4096)})
    for first, other in (("one", "other"), (f"one/run-1_{step}.safetensors", f"other/run-1_{step}.safetensors")):
        printed = run_program("diff", tmp_path / first, tmp_path / other)[1]
        rows = [line for line in printed.splitlines()[2:] if line]
        assert name in rows[1]
        assert max(map(len, rows)) <= 100


def test_a_file_is_equal_to_itself_also_in_bfloat16(files, run_program):
    for file in (files[0], "half.ckpt"):
        assert "Parameters are equal." in run_program("diff", file, file)[1]
        assert " 0.00e+00" in run_program("diff", file, file)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["half.ckpt", "missing.ckpt"], "missing.ckpt"),
        (["half.ckpt", "run-1_4.ckpt"], "no name of the first (half) is in the second"),
        (["half.ckpt", "half.ckpt", "--modules", "hal"], "'hal' is not among them. The nearest names are half"),
    ],
)
def test_what_the_command_cannot_compare_is_said(files, run_program, arguments, message):
    code, _, errors = run_program("diff", *arguments)
    assert (code, message in errors) == (1, True)


@pytest.mark.parametrize(
    ("errors", "step"),
    [
        ([1e-6, 2e-6, 3e-6, 1e-5, 3e-5], 50),
        ([1e-6, 9e-6], None),
        ([1e-6, 1e-5], 20),
        ([0.5], None),
        ([0.5, 0.5, 0.5], None),
        ([0.0, 0.0, 1e-9, 1.0], 30),
        ([0.0, 0.0, 0.0], None),
        # Of the steps before, the median counts, so one step far away does not hide the drift.
        ([1e-6, 1e-6, 5e-6, 1e-6, 2e-4], 50),
        ([1e-6, math.nan, 1e-6], 20),
        ([math.nan, math.nan, 1.0], None),
        ([1.0, math.inf], 20),
    ],
)
def test_drift_begins_at_ten_times_the_median_before(errors, step):
    assert drift_step({10 * number: error for number, error in enumerate(errors, 1)}) == step


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Return two folders with checkpoints of the steps 10 to 50; the weights drift apart from step 40."""
    monkeypatch.chdir(tmp_path)
    for folder, steps in (("one", (10, 20, 30, 40)), ("other", (20, 30, 40, 50))):
        for step in steps:
            file = tmp_path / folder / f"rank_0/run-1_{step}.safetensors"
            file.parent.mkdir(parents=True, exist_ok=True)
            error = 0.0 if folder == "one" else 1e-6 if step < 40 else 0.25
            save_arrays(file, {"a.w": np.float32([4.0 + 4.0 * error, 0.0]), "b.w": np.float32([1.0 + error / 10])})
    return "one", "other"


def test_two_folders_are_compared_at_each_step(folders, run_program):
    code, printed, _ = run_program("diff", *folders)
    verdict, _, head, *rows = printed.splitlines()
    assert code == 0
    assert ("drift apart from step 40." in verdict, " a.w is then 2.00e-01." in verdict) == (True, True)
    assert head.split() == ["step", "worst", "Parameter", "relative", "largest", "equal"]
    assert [row.split()[:2] for row in rows[:3]] == [["20", "a.w"], ["30", "a.w"], ["40", "a.w"]]
    assert rows[2].split()[2:] == ["2.00e-01", "1.00e+00", "0", "of", "2"]
    assert rows[6:] == ["Steps only in one: 10.", "Steps only in other: 50."]
    shown = run_program("diff", *folders, "--worst", 2)[1].splitlines()[3:9]
    assert [row.split()[:2] for row in shown] == [
        [step, name] for step in ("20", "30", "40") for name in ("a.w", "b.w")
    ]
    shown = run_program("diff", *folders, "--modules", "b")[1]
    assert ("a.w" in shown, "drift apart from step 40." in shown) == (False, True)
    content = json.loads(run_program("diff", *folders, "--json")[1])
    assert (content["drift_step"], [step["step"] for step in content["steps"]]) == (40, [20, 30, 40])
    assert [each["name"] for each in content["steps"][0]["parameters"]] == ["a.w", "b.w"]


def test_folders_that_stay_together_or_share_one_step(folders, run_program, tmp_path):
    assert "are equal at all 4 steps." in run_program("diff", "one", "one")[1]
    (tmp_path / "other/rank_0/run-1_40.safetensors").unlink()
    assert "do not drift apart: " in run_program("diff", *folders)[1]
    (tmp_path / "other/rank_0/run-1_30.safetensors").unlink()
    # Step 20 is the newest step of neither folder, but the only one that both have.
    content = json.loads(run_program("diff", *folders, "--json")[1])
    assert (content["step"], content["reference_step"]) == (20, 20)
    (tmp_path / "other/rank_0/run-1_20.safetensors").unlink()
    assert "The steps differ: 40 and 50." in run_program("diff", *folders)[1]

"""The command that prints the state of loss scaling in a checkpoint, on files of real cells and laid-out folders."""

import functools
import json
import tracemalloc

import mindformers.wrapper
import mindspore
import numpy as np
import pytest
from dense_network import Dense
from mindspore import Tensor, nn
from safetensors.numpy import save_file

from mindformers_adaptive.mindformers.checkpoint_reader import read_checkpoints, write_sidecar
from mindformers_adaptive.mindformers.checkpoint_report import report_text
from mindformers_adaptive.wrapper import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
)

FORMATS = ["ckpt", "safetensors"]
CELLS = {
    "adaptive": AdaptiveLossScaleUpdateCell,
    "adaptive (MindFormers' own cell)": mindformers.wrapper.AdaptiveLossScaleUpdateCell,
    "dynamic (no window)": nn.DynamicLossScaleUpdateCell,
}
STATE = ["loss_scale", "scale_window", "window_index", "growth_num", "down_num", "cur_iter", "last_overflow_iter"]
STATE += ["skipped_steps", "consecutive_overflows"]


@pytest.fixture
def inspect(run_program):
    """A function that runs the command, and returns its exit code, what it printed, and its error output."""
    return functools.partial(run_program, "inspect")


@pytest.fixture
def inspect_json(inspect):
    """Return a function that runs the command with --json, and returns its exit code and the object printed."""

    def run(path):
        exit_code, printed, _ = inspect(path, "--json")
        return exit_code, json.loads(printed, parse_constant=pytest.fail)

    return run


def test_a_long_note_stands_once_below_the_table():
    note = "a sentence on what was found, which is far too long to stand beside the numbers"
    row = {"rank": None, "kind": "none", "loss_scale": 8.0, "notes": [note]}
    checkpoints = [{"file": "a.ckpt", **row}, {"file": "b.ckpt", **row, "notes": [note, "latest"]}]
    lines = report_text({"checkpoints": checkpoints, "notes": []}).splitlines()
    assert [line.split()[0] for line in lines] == ["file", "a.ckpt", "b.ckpt", "(1)"]
    assert lines[1].rstrip().endswith("8  (1)")
    assert lines[2].endswith("8  (1); latest")
    assert lines[3] == f"(1) {note}"


def test_a_sidecar_alone_tells_which_rule_its_state_is_of(tmp_path):
    # Both rules have a window.
    for name, cell in (("adaptive", AdaptiveLossScaleUpdateCell), ("guided", GradientGuidedLossScaleUpdateCell)):
        state = cell(2.0**12, 2, 20).state() if name == "adaptive" else cell(2.0**12).state()
        (folder := tmp_path / name / "iteration_00000008").mkdir(parents=True)
        write_sidecar(folder, state.pop("loss_scale"), state)
        [found] = read_checkpoints(folder)
        assert (found.kind, found.values["scale_window"]) == (name, state["scale_window"])


def test_of_files_whose_steps_nobody_knows_the_newest_has_the_largest_numbers_in_its_name(tmp_path):
    # By epoch and step within the epoch.
    for name in ("net-2_10", "net-10_1", "net-2_9"):
        save_file({"weight": np.ones(1, np.float32)}, tmp_path / f"{name}.safetensors")
    found = read_checkpoints(tmp_path)
    assert [one.path.stem for one in found] == ["net-2_9", "net-2_10", "net-10_1"]
    assert {one.step for one in found} == {None}


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("kind", CELLS)
def test_shows_what_the_train_step_of_each_cell_saved(graph_mode, tmp_path, inspect, inspect_json, kind, file_format):
    # One clean step and two overflows have moved everything that these cells can move by then.
    expected = {"loss_scale": 2.0**10, "cur_iter": 4, "last_overflow_iter": 3}
    if kind != "dynamic (no window)":
        expected |= {"scale_window": 20, "window_index": 0, "growth_num": 0, "down_num": 2}
    if kind == "adaptive":
        expected |= {"skipped_steps": 2, "consecutive_overflows": 2}
    train_step = Dense().train_step(CELLS[kind](2.0**12, 2, 20))
    for overflow in (False, True, True):
        train_step(*Dense.batch(overflow))
    file = save(train_step, tmp_path / "mine", file_format)
    exit_code, report = inspect_json(file)
    (shown,) = report["checkpoints"]
    assert (exit_code, report["found"], shown["kind"]) == (0, True, kind)
    assert {name: shown[name] for name in STATE} == {name: expected.get(name) for name in STATE}
    exit_code, printed, errors = inspect(file)
    assert (exit_code, errors) == (0, "")
    (row,) = table(printed)
    assert [row[name] for name in STATE] == [f"{expected[name]:.0f}" if name in expected else "-" for name in STATE]
    assert "hysteresis_budget" not in row
    assert f"state: {kind}" in printed.splitlines()


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (
            {"net.loss_scaling_manager.scale_window": 50, "net.scale_sense": 64.0, "net.optimizer.global_step": 7},
            {"scale_window": 50, "loss_scale": 64.0, "global_step": 7},
        ),
        # A bare name comes before one with a prefix.
        (
            {"a.scale_window": 20, "scale_window": 30, "z.scale_sense": 8.0, "loss_scale": 1.0},
            {"scale_window": 30, "loss_scale": 8.0, "notes": []},
        ),
        (
            {"b.list_index": 2, "a.list_index": 1},
            {"window_index": 1, "notes": ["a.list_index is 1 but b.list_index is 2; a.list_index is shown"]},
        ),
        # What has another shape is something else.
        ({"attention.loss_scale": np.ones((4,), np.float32), "attention.weight": 1.0}, {"kind": "none"}),
        (
            {"guided_counts": np.zeros(4), "guided_overflow_rate": np.zeros(3), "scale_sense": 8.0},
            {"kind": "loss scale only"},
        ),
    ],
)
def test_values_are_found_by_the_last_part_of_their_names(tmp_path, inspect_json, file_format, parameters, expected):
    exit_code, report = inspect_json(save(parameters, tmp_path / "mine", file_format))
    (shown,) = report["checkpoints"]
    assert {name: shown[name] for name in expected} == expected
    assert exit_code == (expected.get("kind") == "none")


@pytest.mark.parametrize("file_format", FORMATS)
def test_what_a_user_appends_is_shown_and_text_is_passed_over(tmp_path, inspect_json, file_format):
    appended = {"step_num": 20, "loss_scale": 1024.0}
    if file_format == "ckpt":  # safetensors has no text
        appended["skipped_steps"] = "many"
    file = tmp_path / f"mine.{file_format}"
    mindspore.save_checkpoint(nn.Dense(3, 2), str(file), append_dict=appended, format=file_format)
    exit_code, report = inspect_json(file)
    (shown,) = report["checkpoints"]
    assert (exit_code, shown["kind"], shown["step_num"], shown["loss_scale"]) == (0, "loss scale only", 20, 1024.0)
    assert shown["skipped_steps"] is None


@pytest.mark.parametrize("file_format", FORMATS)
def test_sound_file_without_state_is_said_to_have_none(tmp_path, inspect, file_format):
    file = save(nn.Dense(3, 2), tmp_path / "weights", file_format)
    exit_code, printed, errors = inspect(file)
    assert exit_code == 1
    assert "state: none" in printed.splitlines()
    assert str(file) in errors
    assert "they hold no state" in errors


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_a_string_in_json(tmp_path, inspect, inspect_json, value):
    for rank in (0, 1):
        file = save({"scale_sense": value}, tmp_path / f"rank_{rank}" / "x-1_5", "safetensors")
    exit_code, report = inspect_json(file)
    assert (exit_code, report["checkpoints"][0]["loss_scale"]) == (0, str(value))
    assert "they agree" in inspect(tmp_path)[1]


def test_files_of_a_rank_come_newest_last_by_step_and_not_by_name(tmp_path, inspect):
    (tmp_path / "1²1-1_300.safetensors").write_bytes(b"torn")
    for name, step in (("a-2_20", 60), ("b-1_100", 100), ("c-1_9", 9)):
        legacy(tmp_path / name, step, scale_window=20)
    save({"scale_window": 30}, tmp_path / "no_step", "safetensors")
    (tmp_path / "d-1_70.safetensors").write_bytes(b"torn")
    listed = [row["file"].partition(".")[0] for row in table(inspect(tmp_path)[1])]
    assert listed == ["c-1_9", "a-2_20", "d-1_70", "b-1_100", "1²1-1_300", "no_step"]


@pytest.mark.parametrize("window_of_rank_1", [30, 40])
def test_ranks_are_compared_where_they_saved_the_same_step(tmp_path, inspect, window_of_rank_1):
    for rank, windows in ((0, {20: 20, 40: 30}), (1, {20: 20, 40: window_of_rank_1})):
        for step, window in windows.items():
            legacy(tmp_path / f"rank_{rank}" / f"llama_rank_{rank}-1_{step}", step, scale_window=window)
    _, printed, _ = inspect(tmp_path)
    rows = table(printed)
    agree = window_of_rank_1 == 30
    note = "" if agree else "differs from rank_0: scale_window 40, not 30"
    expected = [("rank_0", "20", ""), ("rank_1", "20", ""), ("rank_0", "40", ""), ("rank_1", "40", note)]
    assert [(row["file"][:6], row["step_num"], row["note"]) for row in rows] == expected
    assert ("ranks: they agree" in printed, "ranks: they differ" in printed) == (agree, not agree)


def test_ranks_are_compared_by_name_where_no_step_is_known(tmp_path, inspect):
    for rank in (0, 1):
        save({"scale_window": 20}, tmp_path / f"rank_{rank}" / f"a_rank_{rank}", "safetensors")
        save({"scale_window": 30 + rank}, tmp_path / f"rank_{rank}" / "b", "safetensors")
    assert [(row["file"], row["note"]) for row in table(inspect(tmp_path)[1])] == [
        ("rank_0/a_rank_0.safetensors", ""),
        ("rank_1/a_rank_1.safetensors", ""),
        ("rank_0/b.safetensors", ""),
        ("rank_1/b.safetensors", "differs from rank_0: scale_window 31, not 30"),
    ]


@pytest.mark.parametrize("torn", FORMATS)
def test_a_torn_file_gets_a_row_that_says_so_and_the_others_are_still_printed(tmp_path, inspect, inspect_json, torn):
    legacy(tmp_path / "rank_0" / "x-1_20", 20, scale_window=20)
    newest = legacy(tmp_path / "rank_0" / "x-1_40", 40, torn, scale_window=20)
    tear(newest)
    exit_code, printed, _ = inspect(tmp_path)
    sound, broken = table(printed)
    assert exit_code == 0
    assert (sound["file"], sound["scale_window"], sound["note"]) == ("rank_0/x-1_20.safetensors", "20", "")
    assert (broken["file"], broken["scale_window"]) == (f"rank_0/x-1_40.{torn}", "-")
    assert broken["note"].startswith("cannot be read: ")
    assert [shown["kind"] for shown in inspect_json(tmp_path)[1]["checkpoints"]][1] == "unreadable"

    exit_code, _, errors = inspect(newest)
    assert exit_code == 1
    assert f"unreadable: {newest.name}" in errors


@pytest.mark.parametrize("name", ["empty.ckpt", "empty.safetensors", "other.txt"])
def test_a_file_that_is_no_checkpoint_is_named(tmp_path, inspect, name):
    (tmp_path / name).touch()
    exit_code, printed, errors = inspect(tmp_path / name)
    assert exit_code == 1
    assert table(printed)[0]["note"].startswith("cannot be read: ")
    assert name in errors


@pytest.mark.parametrize("where", ["", "nothing", "nothing.ckpt"])
def test_empty_folder_and_missing_path_are_named_and_json_stays_json(tmp_path, inspect, inspect_json, where):
    exit_code, printed, errors = inspect(tmp_path / where)
    assert (exit_code, printed) == (1, "")
    assert str(tmp_path / where) in errors
    assert ("No such file" in errors) == bool(where)
    exit_code, report = inspect_json(tmp_path / where)
    assert (exit_code, report["found"], report["checkpoints"]) == (1, False, [])


def test_iteration_shows_optimizer_state_and_sidecar_and_which_is_the_latest(tmp_path, inspect):
    iteration(tmp_path, 20, optimizer={"scale_window": 20, "list_index": 0})
    iteration(tmp_path, 100, sidecar={"scale_window": 30, "window_index": 1, "skipped_steps": 4})
    iteration(tmp_path, 40)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    exit_code, printed, _ = inspect(tmp_path)
    columns = ["step_num", "global_step", "loss_scale", "scale_window", "window_index", "skipped_steps", "note"]
    assert exit_code == 0
    assert [[row[name] for name in columns] for row in table(printed)] == [
        ["20", "18", "1024", "20", "0", "-", ""],
        ["40", "38", "1024", "-", "-", "-", ""],
        ["100", "98", "1024", "30", "1", "4", "latest"],
    ]
    assert printed.splitlines()[-3:] == [
        "state of iteration_00000020: adaptive (MindFormers' own cell)",
        "state of iteration_00000040: loss scale only",
        "state of iteration_00000100: adaptive",
    ]


def test_files_of_an_iteration_that_disagree_are_reported(tmp_path, inspect_json):
    optimizer = {"scale_window": 20, "list_index": 0}
    folder = iteration(tmp_path, 20, optimizer=optimizer, sidecar={"scale_window": 30, "window_index": 0})
    (shown,) = inspect_json(folder.rename(tmp_path / "kept"))[1]["checkpoints"]
    assert (shown["file"], shown["step_num"], shown["scale_window"]) == ("kept", 20, 20)
    assert shown["notes"] == ["scale_window is 20 in llama-opt-0000000-0000001.safetensors but 30 in loss_scale.json"]


@pytest.mark.parametrize("name", ["common.json", "loss_scale.json", "llama-opt-0000000-0000001.safetensors"])
def test_a_torn_file_of_an_iteration_is_named_and_the_rest_is_shown(tmp_path, inspect_json, name):
    optimizer = {"scale_window": 20, "list_index": 0}
    folder = iteration(tmp_path, 20, optimizer=optimizer, sidecar={"scale_window": 20, "window_index": 0})
    tear(folder / name)
    exit_code, report = inspect_json(folder)
    (shown,) = report["checkpoints"]
    assert (exit_code, shown["loss_scale"], shown["scale_window"], shown["window_index"]) == (0, 1024.0, 20, 0)
    assert shown["notes"][0].startswith(f"{name} cannot be read: ")


def test_iteration_of_training_without_loss_scaling_has_none(tmp_path, inspect_json):
    folder = iteration(tmp_path, 20)
    (folder / "common.json").write_text(json.dumps({"step_num": 20, "global_step": 20, "loss_scale": None}))
    exit_code, report = inspect_json(tmp_path)
    (shown,) = report["checkpoints"]
    assert (exit_code, shown["kind"], shown["step_num"]) == (1, "none", 20)
    save({"global_step": 19}, folder / "llama-opt-0000000-0000001", "safetensors")
    (shown,) = inspect_json(tmp_path)[1]["checkpoints"]
    assert (shown["kind"], len(shown["notes"])) == ("none", 1)
    (folder / "common.json").write_text("{")
    assert inspect_json(tmp_path)[1]["checkpoints"][0]["kind"] == "unreadable"


@pytest.mark.parametrize(
    ("content", "note"),
    [("60", "there is no folder iteration_00000060"), ("release", "latest_checkpointed_iteration.txt")],
)
def test_a_wrong_pointer_to_the_latest_iteration_is_reported(tmp_path, inspect_json, content, note):
    iteration(tmp_path, 40)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(content)
    exit_code, report = inspect_json(tmp_path)
    assert exit_code == 0
    assert note in report["notes"][-1]
    assert report["checkpoints"][0]["notes"] == []


@pytest.mark.parametrize("name", ["x\x1b[2J\x1b]0;owned\x07-1_20", "x\n20 30-1_20", "x\u202e-1_20", "x\udcff-1_20"])
def test_control_characters_in_names_are_printed_as_escapes(tmp_path, inspect, inspect_json, name):
    (tmp_path / f"{name}.ckpt").touch()
    legacy(tmp_path / "x-1_30", 30, scale_window=20)
    escaped = name.encode("unicode_escape").decode()
    exit_code, printed, _ = inspect(tmp_path)
    assert exit_code == 0
    assert printed.splitlines()[1].startswith(f"{escaped}.ckpt  ")
    assert f"state of {escaped}.ckpt: unreadable" in printed.splitlines()
    exit_code, printed, errors = inspect(tmp_path / f"{name}.ckpt")
    assert exit_code == 1
    assert f"{escaped}.ckpt: unreadable: {escaped}.ckpt." in errors
    assert all(line.isprintable() for line in (printed + errors).split("\n"))
    assert inspect_json(tmp_path)[1]["checkpoints"][0]["file"] == f"{name}.ckpt"


@pytest.mark.parametrize(("file_format", "imported"), [("ckpt", True), ("safetensors", False)])
def test_mindspore_is_imported_only_for_a_ckpt(tmp_path, run_python, file_format, imported):
    file = legacy(tmp_path / "x-1_20", 20, file_format, scale_window=20)
    code = "import sys; from mindformers_adaptive.cli.program import main; main(['inspect', {!r}]); {}"
    code = code.format(str(file), "print('mindspore' in sys.modules)")
    assert run_python("-c", code).stdout.splitlines()[-1] == str(imported)


def test_weights_of_a_safetensors_file_are_not_read(tmp_path):
    weights = np.ones((1000, 1000), np.float32)
    file = save(
        {"scale_window": 20, "weight": weights, "optimizer.scale_window": weights}, tmp_path / "x", "safetensors"
    )
    read_checkpoints(file)  # imports are not to be counted
    tracemalloc.start()
    (checkpoint,) = read_checkpoints(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert checkpoint.values["scale_window"] == 20
    assert peak < weights.nbytes / 10


def save(what, path, file_format):
    """Save a cell, or values by Parameter name; return the file."""
    file = path.with_name(f"{path.name}.{file_format}")
    file.parent.mkdir(exist_ok=True)
    if isinstance(what, nn.Cell):
        mindspore.save_checkpoint(what, str(file), format=file_format)
        return file
    arrays = {name: np.asarray(value) for name, value in what.items()}
    arrays = {name: array.astype("f4" if array.dtype.kind == "f" else "i4") for name, array in arrays.items()}
    if file_format == "ckpt":
        mindspore.save_checkpoint([{"name": name, "data": Tensor(array)} for name, array in arrays.items()], str(file))
    else:
        save_file(arrays, file)
    return file


def legacy(path, step, file_format="safetensors", **state):
    """Save what MindFormers' legacy format has, weights included."""
    weights = np.ones((64, 64), np.float32)
    common = {"weight": weights, "step_num": step, "scale_sense": 1024.0, "loss_scale": 1024.0}
    return save({**common, **state}, path, file_format)


def iteration(parent, step, optimizer=None, sidecar=None):
    """Lay out the folder of one step of MindFormers' ``checkpoint:`` format."""
    folder = parent / f"iteration_{step:08d}"
    folder.mkdir()
    weights = {"weight": np.ones((64, 64), np.float32)}
    save(weights, folder / "llama-model-0000000-0000001", "safetensors")
    if optimizer is not None:
        save({**weights, **optimizer}, folder / "llama-opt-0000000-0000001", "safetensors")
    common = {"epoch_num": 1, "step_num": step, "global_step": step - 2, "loss_scale": 1024.0, "ckpt_status": None}
    (folder / "common.json").write_text(json.dumps(common))
    if sidecar is not None:
        write_sidecar(folder, 1024.0, sidecar)
    return folder


def tear(file):
    content = file.read_bytes()
    file.chmod(0o600)
    file.write_bytes(content[: len(content) // 2])


def table(printed):
    """The rows of the table as dicts by column."""
    lines = printed.splitlines()
    names = lines[0].split()
    rows = []
    for line in lines[1:]:
        cells = line.split(None, len(names) - 1)
        if len(cells) < len(names) - 1 or not set(cells[1]) <= set("-0123456789"):
            break
        rows.append(dict(zip(names, [*cells, ""], strict=False)))
    return rows


def test_two_kinds_in_one_folder_have_one_table_without_vectors(tmp_path, inspect):
    step = Dense().train_step(AdaptiveLossScaleUpdateCell(2.0**14, 2, 20, hysteresis=3))
    save(step, tmp_path / "adaptive", "safetensors")
    save(Dense().train_step(GradientGuidedLossScaleUpdateCell(2.0**14)), tmp_path / "guided", "safetensors")
    of_adaptive, of_guided = table(inspect(tmp_path)[1])
    assert (of_adaptive["window_index"], of_guided["window_index"]) == ("0", "-")
    assert (of_adaptive["first_exponent"], of_guided["first_exponent"]) == ("-", "14")
    assert (of_adaptive["hysteresis_budget"], of_guided["hysteresis_budget"]) == ("3", "-")
    assert "overflow_rate" not in of_guided


def test_ranks_that_differ_in_a_rate_are_told(tmp_path, inspect):
    step = Dense().train_step(GradientGuidedLossScaleUpdateCell(2.0**14))
    content = {name: parameter.asnumpy() for name, parameter in step.parameters_dict().items()}
    for rank in (0, 1):
        content["guided_overflow_rate"] = content["guided_overflow_rate"] + np.float32(rank)
        save(content, tmp_path / f"rank_{rank}" / "x-1_6", "safetensors")
    assert "ranks: they differ" in inspect(tmp_path)[1]

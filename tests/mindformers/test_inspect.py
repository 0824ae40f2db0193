"""The ``inspect`` command shows the loss-scaling state of the newest checkpoint, saved by cells or made by hand."""

import functools
import json
import tracemalloc

import mindformers.wrapper
import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from safetensors.numpy import save_file

from mindformers_adaptive.mindformers.checkpoint_formats import write_sidecar
from mindformers_adaptive.mindformers.checkpoint_reader import read_checkpoints
from mindformers_adaptive.wrapper import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
)
from tests.shared.networks import Dense

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
    """Return a function that runs ``inspect``, and returns its exit code, its output, and its error output."""
    return functools.partial(run_program, "inspect")


@pytest.fixture
def inspect_json(inspect):
    """Return a function that runs ``inspect --json``; it returns the exit code, and the printed object or the error."""

    def run(path):
        exit_code, printed, errors = inspect(path, "--json")
        return exit_code, json.loads(printed, parse_constant=pytest.fail) if printed else errors

    return run


def test_newest_file_of_unknown_steps_has_the_largest_numbers(tmp_path):
    # The file names have the epoch and the step within the epoch, so the total number of steps is unknown.
    for name in ("net-2_10", "net-10_1", "net-2_9"):
        save_file({"weight": np.ones(1, np.float32)}, tmp_path / f"{name}.safetensors")
    checkpoints = read_checkpoints(tmp_path)
    assert [checkpoint.path.stem for checkpoint in checkpoints] == ["net-2_9", "net-2_10", "net-10_1"]
    assert {checkpoint.step for checkpoint in checkpoints} == {None}


@pytest.mark.parametrize("kind", CELLS)
def test_shows_what_the_train_step_of_each_cell_saved(graph_mode, tmp_path, inspect, inspect_json, kind):
    # The expected state after one clean step and two overflows. Every counter that can change within three steps has
    # changed.
    expected = {"loss_scale": 2.0**10, "cur_iter": 4, "last_overflow_iter": 3}
    if kind != "dynamic (no window)":
        expected |= {"scale_window": 20, "window_index": 0, "growth_num": 0, "down_num": 2}
    if kind == "adaptive":
        expected |= {"skipped_steps": 2, "consecutive_overflows": 2}
    train_step = Dense().train_step(CELLS[kind](2.0**12, 2, 20))
    for overflow in (False, True, True):
        train_step(*Dense.batch(overflow))
    for file_format in FORMATS:
        file = save(train_step, tmp_path / "mine", file_format)
        exit_code, shown = inspect_json(file)
        assert (exit_code, shown["kind"]) == (0, kind)
        assert {name: shown[name] for name in STATE} == {name: expected.get(name) for name in STATE}
        exit_code, printed, errors = inspect(file)
        assert (exit_code, errors) == (0, "")
        [summary, _, *details] = printed.splitlines()
        assert (f"step {expected['cur_iter']} " in summary, "2^10" in summary) == (True, True)
        lines = dict(line.partition("  #")[0].rstrip().split(": ") for line in details)
        assert {name: lines.get(name) for name in STATE} == {
            name: f"{expected[name]:.0f}" if name in expected else None for name in STATE
        }
        assert (lines["file"], lines["kind"]) == (file.name, kind)


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (
            {"net.loss_scaling_manager.scale_window": 50, "net.scale_sense": 64.0, "net.optimizer.global_step": 7},
            {"scale_window": 50, "loss_scale": 64.0, "global_step": 7},
        ),
        # A Parameter name without a prefix takes precedence over a name with a prefix.
        (
            {"a.scale_window": 20, "scale_window": 30, "z.scale_sense": 8.0, "loss_scale": 1.0},
            {"scale_window": 30, "loss_scale": 8.0, "notes": []},
        ),
        (
            {"b.list_index": 2, "a.list_index": 1},
            {"window_index": 1, "notes": ["a.list_index is 1 but b.list_index is 2; a.list_index is shown"]},
        ),
        # A Parameter named like a loss-scaling Parameter, but of another shape, is not part of the loss-scaling state.
        ({"attention.loss_scale": np.ones((4,), np.float32), "attention.weight": 1.0}, None),
        (
            {"guided_counts": np.zeros(4), "guided_overflow_rate": np.zeros(3), "scale_sense": 8.0},
            {"kind": "loss scale only"},
        ),
    ],
)
def test_values_are_found_by_the_last_part_of_their_names(tmp_path, inspect_json, file_format, parameters, expected):
    exit_code, shown = inspect_json(save(parameters, tmp_path / "mine", file_format))
    if expected is None:
        assert (exit_code, "no loss-scaling state" in shown) == (1, True)
    else:
        assert (exit_code, {name: shown[name] for name in expected}) == (0, expected)


@pytest.mark.parametrize("file_format", FORMATS)
def test_what_a_user_appends_is_shown_and_text_is_passed_over(tmp_path, inspect_json, file_format):
    appended = {"step_num": 20, "loss_scale": 1024.0}
    if file_format == "ckpt":  # safetensors cannot store text
        appended["skipped_steps"] = "many"
    file = tmp_path / f"mine.{file_format}"
    mindspore.save_checkpoint(nn.Dense(3, 2), str(file), append_dict=appended, format=file_format)
    exit_code, shown = inspect_json(file)
    assert (exit_code, shown["kind"], shown["step_num"], shown["loss_scale"]) == (0, "loss scale only", 20, 1024.0)
    assert shown["skipped_steps"] is None


@pytest.mark.parametrize("file_format", FORMATS)
def test_sound_file_without_state_is_said_to_have_none(tmp_path, inspect, file_format):
    file = save(nn.Dense(3, 2), tmp_path / "weights", file_format)
    exit_code, printed, errors = inspect(file)
    assert (exit_code, printed) == (1, "")
    assert f"no loss-scaling state in '{file}'" in errors
    assert "Save the train step" in errors
    copy = tmp_path / "other" / "weights"
    for torn in (copy, copy.with_name("weights_2")):
        torn.parent.mkdir(exist_ok=True)
        torn.with_suffix(f".{file_format}").write_bytes(b"torn")
    errors = inspect(copy.parent)[2]
    # A problem that several files have is said once.
    assert (errors.count("cannot be read"), errors.count("Give another checkpoint")) == (1, 1)


def test_the_output_folder_of_a_run_stands_for_its_checkpoints(tmp_path, inspect_json, run_program):
    runs = [tmp_path / "in_output", tmp_path / "elsewhere"]
    saved = [runs[0] / "checkpoint" / "rank_0", tmp_path / "other_disk" / "rank_0"]
    for run, folder in zip(runs, saved, strict=True):
        run.mkdir()
        folder.mkdir(parents=True)
        (run / "loss_scale_record.jsonl").touch()
        for step in (10, 20):
            legacy(folder / f"x-1_{step}", step, scale_window=step)
    callbacks = [{"type": "MFLossMonitor"}, {"type": "CheckpointMonitor", "directory": str(saved[1].parent)}]
    (runs[1] / "loss_scale_config.yaml").write_text(f"# register-path:\ncallbacks: {json.dumps(callbacks)}\n")
    for run in runs:
        exit_code, shown = inspect_json(run)
        assert (exit_code, shown["step_num"], shown["scale_window"]) == (0, 20, 20)
    exit_code, printed, _ = run_program("diff", *runs)
    assert (exit_code, printed.splitlines()[0]) == (0, "The two are equal at all 2 steps.")
    assert [step["step"] for step in json.loads(run_program("diff", *runs, "--json")[1])["steps"]] == [10, 20]
    runs[0].joinpath("checkpoint").rename(tmp_path / "gone")
    exit_code, errors = inspect_json(runs[0])
    assert (exit_code, "no .ckpt or .safetensors file" in errors) == (1, True)


@pytest.mark.parametrize(
    ("parameters", "name", "value"),
    [
        ({"scale_sense": np.nan}, "loss_scale", "nan"),
        ({"scale_sense": 0.0}, "loss_scale", "0"),
        ({"scale_sense": -8.0}, "loss_scale", "-8"),
        ({"scale_sense": np.inf}, "loss_scale", "inf"),
        ({"scale_sense": 8.0, "current_iterator_step": -5}, "cur_iter", "-5"),
        ({"scale_sense": 8.0, "step_num": -5}, "step_num", "-5"),
        ({"scale_sense": 8.0, "skipped_steps": -1}, "skipped_steps", "-1"),
        ({"scale_sense": 8.0, "list_index": -2}, "window_index", "-2"),
        ({"scale_sense": 8.0, "largest_gradient": np.nan}, "largest_gradient", "nan"),
    ],
)
def test_a_number_that_no_training_saves_is_named(tmp_path, inspect, inspect_json, parameters, name, value):
    file = save(parameters, tmp_path / "x", "safetensors")
    shown = inspect_json(file)[1]
    # JSON has no numbers for infinity and NaN.
    assert shown[name] == (value if value in ("inf", "nan") else int(value))
    [note] = shown["notes"]
    assert note.startswith(f"{name} is {value}, but must ")
    assert f"note: {note}" in inspect(file)[1]
    assert "is not sound" in inspect(file)[1].splitlines()[0]
    # The index -1 is a window of 1 step.
    assert inspect_json(save({"scale_sense": 8.0, "list_index": -1}, tmp_path / "y", "safetensors"))[1]["notes"] == []


def test_a_line_says_what_its_number_is(tmp_path, inspect):
    state = {"list_index": 1, "scale_window_up_count": 2, "current_iterator_step": 21}
    adaptive = inspect(legacy(tmp_path / "x-1_20", 20, scale_window=20, **state))[1].splitlines()[2:]
    assert {line.partition(":")[0] for line in adaptive if "  # " not in line} == {"file", "kind"}
    assert "cur_iter: 21  " in "\n".join(adaptive)
    # Fields of the guided rule have meanings of their own.
    iteration(tmp_path, 30, sidecar=GradientGuidedLossScaleUpdateCell(2.0**12).state())
    guided = inspect(tmp_path)[1].splitlines()
    assert {line.partition(":")[0] for line in guided[2:] if "  # " not in line} <= {"file", "kind", "note"}
    assert any("unexplained" in line for line in guided if line.startswith("clean_steps"))


def test_the_newest_is_known_by_its_step_and_not_by_its_name(tmp_path, inspect_json):
    (tmp_path / "1²1-1_300.safetensors").write_bytes(b"torn")
    for name, step in (("a-2_20", 60), ("b-1_100", 100), ("c-1_9", 9)):
        legacy(tmp_path / name, step, scale_window=20)
    save({"scale_window": 30}, tmp_path / "no_step", "safetensors")
    (tmp_path / "d-1_70.safetensors").write_bytes(b"torn")
    listed = [checkpoint.path.stem for checkpoint in read_checkpoints(tmp_path)]
    assert listed == ["c-1_9", "a-2_20", "d-1_70", "b-1_100", "1²1-1_300", "no_step"]
    assert inspect_json(tmp_path)[1]["file"] == "no_step.safetensors"
    (tmp_path / "no_step.safetensors").unlink()
    _, shown = inspect_json(tmp_path)
    [note] = shown["notes"]
    assert (shown["file"], note.partition(":")[0]) == ("b-1_100.safetensors", "1²1-1_300.safetensors")


def test_of_several_ranks_the_first_is_shown(tmp_path, inspect_json):
    for rank in (0, 1):
        for step in (20, 40):
            legacy(tmp_path / f"rank_{rank}" / f"x_rank_{rank}-1_{step}", step, scale_window=step + rank)
    _, shown = inspect_json(tmp_path)
    assert (shown["rank"], shown["step_num"], shown["scale_window"]) == (0, 40, 40)


@pytest.mark.parametrize("torn", FORMATS)
def test_torn_newest_file_is_named_and_the_one_before_is_shown(tmp_path, inspect, inspect_json, torn):
    legacy(tmp_path / "rank_0" / "x-1_20", 20, scale_window=20)
    newest = legacy(tmp_path / "rank_0" / "x-1_40", 40, torn, scale_window=20)
    tear(newest)
    exit_code, shown = inspect_json(tmp_path)
    assert (exit_code, shown["file"], shown["scale_window"]) == (0, "rank_0/x-1_20.safetensors", 20)
    assert shown["notes"][0].startswith(f"rank_0/x-1_40.{torn}: cannot be read: ")
    assert "note: rank_0/x-1_40" in inspect(tmp_path)[1]
    exit_code, printed, errors = inspect(newest)
    assert (exit_code, printed) == (1, "")
    assert f"{newest.name}: cannot be read" in errors


@pytest.mark.parametrize("name", ["empty.ckpt", "empty.safetensors", "other.txt", "nothing.ckpt", "folder"])
def test_a_path_without_a_checkpoint_is_named(tmp_path, inspect, name):
    if name == "folder":
        (tmp_path / name).mkdir()
    elif name != "nothing.ckpt":
        (tmp_path / name).touch()
    exit_code, printed, errors = inspect(tmp_path / name, "--json")
    assert (exit_code, printed, str(tmp_path / name) in errors) == (1, "", True)


def test_iteration_shows_optimizer_state_and_sidecar(tmp_path, inspect_json):
    names = ("step_num", "global_step", "loss_scale", "scale_window", "window_index", "skipped_steps", "kind")
    optimizer = {"scale_window": 20, "list_index": 0}
    for step, state, expected in (
        (20, {"optimizer": optimizer}, [20, 0, None, "adaptive (MindFormers' own cell)"]),
        (40, {}, [None, None, None, "loss scale only"]),
        (100, {"sidecar": {"scale_window": 30, "window_index": 1, "skipped_steps": 4}}, [30, 1, 4, "adaptive"]),
    ):
        iteration(tmp_path, step, **state)
        exit_code, shown = inspect_json(tmp_path)
        assert (exit_code, [shown[name] for name in names]) == (0, [step, step - 2, 1024.0, *expected])


def test_files_of_an_iteration_that_disagree_are_reported(tmp_path, inspect_json):
    optimizer = {"scale_window": 20, "list_index": 0}
    folder = iteration(tmp_path, 20, optimizer=optimizer, sidecar={"scale_window": 30, "window_index": 0})
    _, shown = inspect_json(folder.rename(tmp_path / "kept"))
    assert (shown["file"], shown["step_num"], shown["scale_window"]) == ("kept", 20, 20)
    assert shown["notes"] == ["scale_window is 20 in llama-opt-0000000-0000001.safetensors but 30 in loss_scale.json"]


@pytest.mark.parametrize("name", ["common.json", "loss_scale.json", "llama-opt-0000000-0000001.safetensors"])
def test_torn_file_of_an_iteration_is_named(tmp_path, inspect_json, name):
    optimizer = {"scale_window": 20, "list_index": 0}
    folder = iteration(tmp_path, 20, optimizer=optimizer, sidecar={"scale_window": 20, "window_index": 0})
    tear(folder / name)
    exit_code, shown = inspect_json(folder)
    assert (exit_code, shown["loss_scale"], shown["scale_window"], shown["window_index"]) == (0, 1024.0, 20, 0)
    assert shown["notes"][0].startswith(f"{name} cannot be read: ")


def test_iteration_of_training_without_loss_scaling_has_none(tmp_path, inspect_json):
    folder = iteration(tmp_path, 20)
    (folder / "common.json").write_text(json.dumps({"step_num": 20, "global_step": 20, "loss_scale": None}))
    assert inspect_json(tmp_path)[0] == 1
    (folder / "common.json").write_text("{")
    exit_code, errors = inspect_json(tmp_path)
    assert (exit_code, "common.json cannot be read" in errors) == (1, True)


@pytest.mark.parametrize("name", ["x\x1b[2J\x1b]0;owned\x07-1_40", "x\n20 30-1_40", "x\u202e-1_40", "x\udcff-1_40"])
def test_control_characters_in_names_are_printed_as_escapes(tmp_path, inspect, name):
    (tmp_path / f"{name}.ckpt").touch()
    legacy(tmp_path / "x-1_30", 30, scale_window=20)
    escaped = name.encode("unicode_escape").decode()
    exit_code, printed, _ = inspect(tmp_path)
    assert (exit_code, f"note: {escaped}.ckpt: cannot be read" in printed.replace("\n", " ")) == (0, "\n" not in name)
    exit_code, _, errors = inspect(tmp_path / f"{name}.ckpt")
    assert exit_code == 1
    assert all(line.isprintable() for line in (printed + errors).split("\n"))


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
    read_checkpoints(file)  # Import all modules before memory is measured.
    tracemalloc.start()
    (checkpoint,) = read_checkpoints(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert checkpoint.values["scale_window"] == 20
    assert peak < weights.nbytes / 10


def save(what, path, file_format):
    """Save a cell, or a dictionary of values by Parameter name, as a checkpoint; return the path of the file."""
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
    """Save a checkpoint with the contents of MindFormers' legacy format, weights included."""
    weights = np.ones((64, 64), np.float32)
    common = {"weight": weights, "step_num": step, "scale_sense": 1024.0, "loss_scale": 1024.0}
    return save({**common, **state}, path, file_format)


def iteration(parent, step, optimizer=None, sidecar=None):
    """Create the folder of one step in MindFormers' ``checkpoint:`` format."""
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

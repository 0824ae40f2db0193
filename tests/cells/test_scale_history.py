"""The history on the device is the last steps of the rule, and nothing else in the cell knows of it."""

import warnings

import mindformers
import mindspore
import numpy as np
import pytest
from exported_graph import LossScaleHolder, export_graph, export_update_cell
from mindspore import Tensor, nn
from scale_cells import SideBySide
from test_exported_graph import (
    ARGUMENTS,
    control_flow,
    forbidden_plain_constants,
    forbidden_tensors,
    plain_outputs,
    undocumented_on_ascend,
)

from mindformers_adaptive.cells.adaptive_update_cell import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.cells.text_update_cell import GradientGuidedLossScaleUpdateCell
from mindformers_adaptive.checkpoint.sidecar import read_sidecar, write_sidecar
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.wrapper import TrainOneStepWithLossScaleCell

INITIAL_SCALE = 2.0**16
REFERENCE_PAIR = (mindspore.__version__, mindformers.__version__) == ("2.9.0", "1.9.0")

# Small ladders, so that the windows and all counters move; one that is shorter, one that is longer than the run.
CONFIGURATIONS = (
    {"max_scale_window": 3, "min_scale_window": 1, "history_size": 1},
    {"max_scale_window": 2, "min_scale_window": 1, "scale_factor": 3, "hysteresis": 2, "history_size": 7},
    {"max_scale_window": 3, "min_scale_window": 1, "scale_factor": 1.5, "history_size": 100},
    {"max_scale_window": 1, "min_scale_window": 1, "max_loss_scale": 2.0**18, "history_size": 2},
)


def build(history_size=0, **arguments):
    arguments = {"scale_factor": 2, "max_scale_window": 3, "min_scale_window": 1, **arguments}
    return AdaptiveLossScaleUpdateCell(
        INITIAL_SCALE, scale_window=arguments["min_scale_window"], history_size=history_size, **arguments
    )


def replay(overflows, **arguments):
    """The entries of all steps by the rule."""
    rule = AdaptiveRule(**{"max_scale_window": 3, "min_scale_window": 1, **arguments})
    state, entries = rule.start(INITIAL_SCALE), []
    for step, overflow in enumerate(overflows, start=1):
        before, state = state, rule.step(state, bool(overflow))
        entries.append(
            {
                "step": step,
                "overflow": bool(overflow),
                "loss_scale": before.loss_scale,
                "next_loss_scale": state.loss_scale,
                "scale_window": state.scale_window,
                "window_index": state.window_index,
                "growth_num": state.growth_num,
                "down_num": state.down_num,
                "skipped_steps": state.skipped_steps,
                "consecutive_overflows": state.consecutive_overflows,
            }
        )
    return entries


def test_history_is_the_last_steps_of_the_rule(mode):
    # PyNative mode is slow.
    steps = {"graph": 60, "pynative": 15}[mode]
    flags = np.random.default_rng(0).random((steps, len(CONFIGURATIONS))) < 0.4
    cells = SideBySide([build(**arguments) for arguments in CONFIGURATIONS])
    rules = [{name: value for name, value in it.items() if name != "history_size"} for it in CONFIGURATIONS]
    expected = [replay(column, **arguments) for column, arguments in zip(flags.T, rules, strict=True)]
    for step, overflows in enumerate(flags, start=1):
        cells.step(overflows)
        for cell, entries, arguments in zip(cells.update_cells, expected, CONFIGURATIONS, strict=True):
            assert cell.recent_steps() == entries[:step][-arguments["history_size"] :]
    for name in ("scale_window", "window_index", "growth_num", "down_num", "consecutive_overflows"):
        assert len({entry[name] for entry in expected[0]}) > 1, f"{name} never moved"


def test_entries_are_plain_python(graph_mode):
    [entry] = step_through(build(history_size=3), [True])[0].recent_steps()
    assert {name: type(value) for name, value in entry.items()} == {
        name: bool if name == "overflow" else float if name.endswith("loss_scale") else int for name in entry
    }


@pytest.mark.parametrize(("since", "steps"), [(0, [3, 4, 5]), (2, [3, 4, 5]), (4, [5]), (5, []), (9, [])])
def test_steps_up_to_a_known_one_are_left_out(graph_mode, since, steps):
    cell, _ = step_through(build(history_size=3), [False] * 5)
    assert [entry["step"] for entry in cell.recent_steps(since)] == steps


def test_nothing_is_kept_without_a_history(graph_mode):
    cell, _ = step_through(build(), [False, True])
    assert cell.recent_steps() == []


@pytest.mark.parametrize("history_size", [2, 3, 5, 100])
def test_steps_that_were_undone_are_not_told(graph_mode, history_size):
    cell, holder = step_through(build(history_size=history_size), [False, True, False])
    cell.bind_loss_scale(holder.loss_scale)
    state = cell.state_dict()
    step_through(cell, [True] * 4, holder)
    cell.load_state_dict(state)
    assert cell.recent_steps() == []
    step_through(cell, [False, True], holder)
    assert cell.recent_steps() == replay([False, True, False, False, True])[3:]


def test_checkpoints_are_those_of_a_cell_without_history(graph_mode, tmp_path):
    """Whatever the lengths, a checkpoint loads into another cell, and nothing is missing or left over."""
    files = {}
    for size in (0, 4, 9):
        train_step = build_train_step(size)
        train_step(*batch(np.inf))
        for cell in (train_step, train_step.optimizer):
            assert not any("history" in name for name in cell.parameters_dict())
        files[size] = str(tmp_path / f"history_{size}.ckpt")
        mindspore.save_checkpoint(train_step, files[size])
    names = [set(mindspore.load_checkpoint(file)) for file in files.values()]
    assert names == [names[0]] * 3
    for saved_with, size in ((0, 4), (4, 9), (9, 4), (4, 0)):
        train_step, content = build_train_step(size), mindspore.load_checkpoint(files[saved_with])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            not_loaded, left_over = mindspore.load_param_into_net(train_step, content, strict_load=True)
            train_step.set_train()
        assert (not_loaded, left_over) == ([], [])
        cell = train_step.loss_scaling_manager
        assert (cell.state()["cur_iter"], cell.recent_steps()) == (2, [])
        train_step(*batch(1))
        assert [entry["step"] for entry in cell.recent_steps()] == ([2] if size else [])


def test_state_and_sidecar_are_those_of_a_cell_without_history(graph_mode, tmp_path):
    with_history, without = (step_through(build(history_size=size), [True, False])[0] for size in (4, 0))
    assert with_history.state() == without.state()
    write_sidecar(tmp_path, 2.0, with_history.state())
    resumed = build()
    resumed.load_state_dict({"scale": 2.0, **read_sidecar(tmp_path)[1]})
    assert resumed.state() == with_history.state()


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_its_graph_can_run_on_ascend(graph_mode, hysteresis):
    graph = export_with_history(AdaptiveLossScaleUpdateCell(**ARGUMENTS, hysteresis=hysteresis, history_size=4))
    assert control_flow(graph) == set()
    assert undocumented_on_ascend(graph) == set()
    assert forbidden_tensors(graph) == set()
    assert plain_outputs(graph) == set()
    assert forbidden_plain_constants(graph) == {("INT64", "ExpandDims", 1)}


@pytest.mark.skipif(not REFERENCE_PAIR, reason="the kernels were counted in 2.9.0 and 1.9.0")
def test_it_costs_nine_kernels_and_none_when_off(graph_mode):
    without = export_update_cell(AdaptiveLossScaleUpdateCell(**ARGUMENTS)).kernels
    off = export_update_cell(AdaptiveLossScaleUpdateCell(**ARGUMENTS, history_size=0)).kernels
    on = export_with_history(AdaptiveLossScaleUpdateCell(**ARGUMENTS, history_size=1000)).kernels
    assert sorted(off) == sorted(without)
    assert (len(off), len(on)) == (30, 39)


@pytest.mark.parametrize(
    ("history_size", "error", "message"),
    [
        (True, TypeError, "'history_size' must be an integer number of steps, but got True of type bool"),
        (2.0, TypeError, "'history_size' must be an integer number of steps, but got 2.0 of type float"),
        (-1, ValueError, "'history_size' must be at least 0, but got -1"),
    ],
)
def test_bad_size_is_refused(history_size, error, message):
    with pytest.raises(error, match=message):
        build(history_size=history_size)


def step_through(cell, overflows, holder=None):
    holder = LossScaleHolder(cell, cell.get_loss_scale()) if holder is None else holder
    for overflow in overflows:
        holder(Tensor(overflow))
    return cell, holder


def export_with_history(cell):
    holder = LossScaleHolder(cell, cell.get_loss_scale())
    # Only for the export, which takes no Parameter that belongs to no cell.
    for parameter in (cell.history.scales, cell.history.counts, cell.history.place):
        holder.insert_param_to_cell(parameter.name, parameter, check_name_contain_dot=False)
    return export_graph(holder, Tensor(True))


def build_train_step(history_size):
    net = nn.Dense(3, 2)
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
    return TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, build(history_size))


def batch(value):
    return Tensor(np.full((4, 3), value, np.float32)), Tensor(np.zeros((4, 2), np.float32))


def test_it_is_refused_where_compiled_graphs_are_kept(monkeypatch):
    # A launch that took its graph from there had 14 of 20 steps in its record, and wrong ones.
    monkeypatch.setenv("MS_COMPILER_CACHE_ENABLE", "1")
    with pytest.raises(ValueError, match=r"'history_size' must be 0 while MindSpore keeps compiled graphs.*but got 3"):
        AdaptiveLossScaleUpdateCell(2**16, 2, 20, history_size=3)
    with pytest.raises(ValueError, match=r"'track_per_parameter' must be False while MindSpore.*but got True"):
        GradientGuidedLossScaleUpdateCell(2**16, track_per_parameter=True)
    AdaptiveLossScaleUpdateCell(2**16, 2, 20)
    GradientGuidedLossScaleUpdateCell(2**16)

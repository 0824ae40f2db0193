"""Checkpoints in the format of the YAML section ``checkpoint`` save and restore the loss-scaling state."""

import json

import mindspore
import pytest
from mindspore import nn

from mindformers_adaptive.cells.update_cells import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.mindformers.callbacks import CommonInfo, CommonInfoWithLossScale, restores_sidecar
from mindformers_adaptive.mindformers.checkpoint_formats import FILE_NAME, read_sidecar, write_sidecar
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.fields import form_of
from mindformers_adaptive.rules.state_dict import FORM, RUN
from tests.conftest import ROOT
from tests.shared.networks import Dense

# MindFormers before 1.7 has no `checkpoint:` format.
StockCommonInfo = pytest.importorskip("mindformers.checkpoint.checkpoint").CommonInfo


@pytest.fixture
def step():
    return Dense().train_step(AdaptiveLossScaleUpdateCell(1024, 2, 20))


def test_sidecar_is_beside_an_unchanged_common_json(step, tmp_path):
    step(*Dense.batch(overflow=True))
    info = CommonInfoWithLossScale(step)
    info.step_num = 1
    info.save_common(str(tmp_path / "common.json"))
    state = step.loss_scaling_manager.state()
    assert read_sidecar(tmp_path) == (state.pop("loss_scale"), {**state, RUN: 0, FORM: form_of(AdaptiveRule())})
    stock = StockCommonInfo(step_num=1)
    stock.save_common(str(tmp_path / "stock.json"))
    assert json.loads((tmp_path / "common.json").read_text()) == json.loads((tmp_path / "stock.json").read_text())
    assert StockCommonInfo.load_common(str(tmp_path / "common.json")).step_num == 1


def test_a_restored_scale_is_told_from_one_that_a_user_has_set(tmp_path):
    StockCommonInfo(loss_scale=2.0**20).save_common(str(tmp_path / "common.json"))
    restored = CommonInfo.load_common(str(tmp_path / "common.json")).loss_scale
    with pytest.warns(UserWarning, match=r"'loss_scale_value' 1048576.0, .*: 4096.0 is used"):
        AdaptiveLossScaleUpdateCell(restored, 2, 20, max_loss_scale=4096)
    StockCommonInfo().save_common(str(tmp_path / "common.json"))
    assert CommonInfo.load_common(str(tmp_path / "common.json")).loss_scale is None


def load_nothing(checkpoint, network, optimizer=None):
    """Restore nothing, as MindFormers' loading function does for a checkpoint without optimizer state."""


def test_sidecar_does_not_replace_the_optimizers_state(graph_mode, step, tmp_path):
    write_sidecar(tmp_path, 2.0**15, {"scale_window": 100, "window_index": 4, "cur_iter": 50, RUN: 7})

    def load_optimizer(checkpoint, network, optimizer=None):
        update_cell = optimizer.loss_scaling_manager
        changed = {"scale_window": 30, "window_index": 1, "cur_iter": 40}
        update_cell.load_state_dict({**update_cell.state_dict(), **changed})

    restores_sidecar(load_optimizer)(str(tmp_path), step.network, step.optimizer)
    restored = {"scale_window": 30, "window_index": 1, "cur_iter": 40}
    assert step.loss_scaling_manager.state().items() >= restored.items()
    # The run number, by which a run finds its records again, is not part of a compiled graph. So MindFormers may not
    # restore it with the optimizer's state. The sidecar file restores it.
    assert step.loss_scaling_manager.run_number == 7
    (tmp_path / FILE_NAME).write_text("torn")
    # The optimizer's state includes the loss-scaling state, so the damaged sidecar file is not needed. A warning about
    # the damaged file would fail this test.
    restores_sidecar(load_optimizer)(str(tmp_path), step.network, step.optimizer)


def test_several_processes_get_the_scale_from_the_sidecar(graph_mode, step, tmp_path):
    layouts = pytest.importorskip("mindformers.checkpoint.sharded_tensor")
    if not hasattr(layouts, "complete_optimizer_layout_index"):
        pytest.skip("This version of MindFormers restores the whole state of an optimizer")
    known = {each.name: [None, each.dtype, each.shape] for each in step.network.get_parameters()}
    # If the compiled graph has no layout for a Parameter, MindFormers restores the Parameter only if its name ends in
    # the name of a weight.
    completed, _ = layouts.complete_optimizer_layout_index(dict(known), {0: [*known]}, step.optimizer)
    assert completed.keys() >= {f"moments.{name}" for name in known}
    assert not completed.keys() & step.loss_scaling_manager.parameters_dict().keys()
    moved = {"scale_window": 100, "window_index": 4, "growth_num": 2, "cur_iter": 50}
    state = {**step.loss_scaling_manager.state(), **moved}
    write_sidecar(tmp_path, state["loss_scale"], {**state, RUN: 7})
    restores_sidecar(load_nothing)(str(tmp_path), step.network, step.optimizer)
    assert step.loss_scaling_manager.state() == state
    assert step.loss_scaling_manager.run_number == 7


def test_a_torn_sidecar_is_named_and_never_loaded(step, tmp_path):
    fresh = step.loss_scaling_manager.state()
    (tmp_path / FILE_NAME).write_text('{"format": 1, "loss_scale"')
    with pytest.warns(UserWarning, match=rf"{tmp_path}/{FILE_NAME} cannot be used: .* Loss scaling starts afresh."):
        restores_sidecar(load_nothing)(str(tmp_path), step.network, step.optimizer)
    assert step.loss_scaling_manager.state() == fresh


def test_without_a_sidecar_or_an_adaptive_cell_nothing_changes(step, tmp_path):
    fresh = step.loss_scaling_manager.state()
    restores_sidecar(load_nothing)(str(tmp_path), step.network, step.optimizer)
    restores_sidecar(load_nothing)(str(tmp_path), step.network)
    restores_sidecar(load_nothing)(str(tmp_path), step.network, nn.SGD([mindspore.Parameter(1.0, name="w")]))
    assert step.loss_scaling_manager.state() == fresh


def rows_on_a_full_disk(run_forked, tmp_path, legacy, async_save):
    """Train 14 steps, saving every second step; saves 6, 8 and 10 fail. Return each step's files and warnings."""
    run_forked(ROOT / "tests" / "mindformers" / "full_disk.py", json.dumps([legacy, async_save]))
    return {int(step): row for step, row in json.loads((tmp_path / "rows.json").read_text()).items()}


def folders_of(row):
    """Return the numbers of the steps whose checkpoint folders are complete."""
    complete = [name for name in row["files"] if name.endswith("a-opt-0000000-0000001.safetensors")]
    return [int(name[len("iteration_") :].split("/")[0]) for name in complete]


@pytest.mark.parametrize("async_save", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_failed_async_save_warns_and_complete_folders_stay(run_forked, tmp_path, async_save):
    rows = rows_on_a_full_disk(run_forked, tmp_path, False, async_save)
    for saved_at in (6, 8, 10):
        warned = [
            step for step in rows for text in rows[step]["warnings"] if f"/iteration_{saved_at:08d} lacks" in text
        ]
        assert len(warned) == 1
        assert warned[0] - saved_at in (1, 2)
    for step in range(7, 12):
        assert {2, 4} <= set(folders_of(rows[step]))
        assert rows[step]["note"] == "4"
    # Leave out the checkpoint of step 14: its save in the background may have ended after the script listed the files.
    assert folders_of(rows[14])[:2] == [4, 12]
    assert rows[14]["note"] == "12"


def test_failed_async_save_of_a_file_warns_and_is_not_noted(run_forked, tmp_path):
    rows = rows_on_a_full_disk(run_forked, tmp_path, True, "thread")
    warned = "".join(text for step in rows for text in rows[step]["warnings"])
    for saved_at in (6, 8, 10):
        assert f"a_rank_0-1_{saved_at}.safetensors is not there" in warned
    for step in range(7, 12):
        assert "checkpoint/rank_0/a_rank_0-1_4.safetensors" in rows[step]["files"]
        assert json.loads(rows[step]["note"])["last_ckpt_file"] == "a_rank_0-1_4.safetensors"
    meta = json.loads((tmp_path / "saved" / "checkpoint" / "rank_0" / "meta.json").read_text())
    assert meta == {"last_epoch": 1, "last_step": 14, "last_ckpt_file": "a_rank_0-1_14.safetensors"}

"""What MindFormers' ``checkpoint:`` format is given to keep, and what is taken from it again."""

import json

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindformers_adaptive.cells.update_cell import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.checkpoint.monitor import CommonInfo, _CommonInfoWithLossScale, restores_sidecar
from mindformers_adaptive.checkpoint.sidecar import FILE_NAME, read_sidecar, write_sidecar
from mindformers_adaptive.wrapper import TrainOneStepWithLossScaleCell

# MindFormers before 1.7 has no `checkpoint:` format.
StockCommonInfo = pytest.importorskip("mindformers.checkpoint.checkpoint").CommonInfo


@pytest.fixture
def step():
    network = nn.Dense(3, 2)
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20)
    return TrainOneStepWithLossScaleCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, scale_sense=update_cell)


def overflowed(step):
    step(Tensor(np.full((4, 3), np.inf, np.float32)), Tensor(np.zeros((4, 2), np.float32)))


def test_the_sidecar_is_written_with_common_json_which_stays_as_mindformers_writes_it(step, tmp_path):
    overflowed(step)
    info = _CommonInfoWithLossScale(step)
    info.step_num = 1
    info.save_common(str(tmp_path / "common.json"))
    assert read_sidecar(tmp_path) == (512.0, step.loss_scaling_manager.state())
    stock = StockCommonInfo(step_num=1)
    stock.save_common(str(tmp_path / "stock.json"))
    assert json.loads((tmp_path / "common.json").read_text()) == json.loads((tmp_path / "stock.json").read_text())
    assert StockCommonInfo.load_common(str(tmp_path / "common.json")).step_num == 1


def test_a_restored_scale_is_told_from_one_that_a_user_has_set(tmp_path):
    StockCommonInfo(loss_scale=2.0**20).save_common(str(tmp_path / "common.json"))
    restored = CommonInfo.load_common(str(tmp_path / "common.json")).loss_scale
    with pytest.warns(UserWarning, match=r"'loss_scale_value' 1048576.0, which is not between .*: 4096.0 is used"):
        AdaptiveLossScaleUpdateCell(restored, 2, 20, max_loss_scale=4096)
    StockCommonInfo().save_common(str(tmp_path / "common.json"))
    assert CommonInfo.load_common(str(tmp_path / "common.json")).loss_scale is None


def load_nothing(checkpoint, network, optimizer=None):
    """As MindFormers' function where a checkpoint has no optimizer state."""


def test_the_sidecar_is_restored_where_nothing_else_restored_the_state(graph_mode, step, tmp_path):
    state = {**step.loss_scaling_manager.state(), "scale_window": 100, "window_index": 4, "cur_iter": 50}
    write_sidecar(tmp_path, 2.0**15, {**state, "from_a_later_version": 1})
    restores_sidecar(load_nothing)(checkpoint=str(tmp_path), network=step.network, optimizer=step.optimizer)
    assert step.loss_scaling_manager.state() == state


def test_the_sidecar_does_not_replace_what_came_with_the_optimizer(graph_mode, step, tmp_path):
    write_sidecar(tmp_path, 2.0**15, {"scale_window": 100, "window_index": 4, "cur_iter": 50})

    def load_optimizer(checkpoint, network, optimizer=None):
        update_cell = optimizer.loss_scaling_manager
        changed = {"scale_window": 30, "window_index": 1, "cur_iter": 40}
        update_cell.load_state_dict({**update_cell.state_dict(), **changed})

    restores_sidecar(load_optimizer)(str(tmp_path), step.network, step.optimizer)
    assert step.loss_scaling_manager.state()["scale_window"] == 30


def test_a_torn_sidecar_is_named_and_never_loaded(step, tmp_path):
    fresh = step.loss_scaling_manager.state()
    (tmp_path / FILE_NAME).write_text('{"format": 1, "loss_scale"')
    with pytest.warns(UserWarning, match=rf"{tmp_path}/{FILE_NAME} cannot be used: .* The ladder starts afresh."):
        restores_sidecar(load_nothing)(str(tmp_path), step.network, step.optimizer)
    assert step.loss_scaling_manager.state() == fresh


def test_without_a_sidecar_or_an_adaptive_cell_nothing_changes(step, tmp_path):
    fresh = step.loss_scaling_manager.state()
    restores_sidecar(load_nothing)(str(tmp_path), step.network, step.optimizer)
    restores_sidecar(load_nothing)(str(tmp_path), step.network)
    restores_sidecar(load_nothing)(str(tmp_path), step.network, nn.SGD([mindspore.Parameter(1.0, name="w")]))
    assert step.loss_scaling_manager.state() == fresh

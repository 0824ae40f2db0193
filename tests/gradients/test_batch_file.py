"""The monitor saves the batch at which a loss scale collapses; code hidden in a batch file never runs."""

import json
import pickle
import zipfile

import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive import LossScaleMonitor
from mindformers_adaptive.gradients.batch_file import read_batch, save_batch
from mindformers_adaptive.gradients.ranges import gradient_ranges
from mindformers_adaptive.overflow.explain import explain_overflow
from tests.shared.networks import train, train_step_of

pytestmark = pytest.mark.usefixtures("graph_mode", "in_a_folder_of_its_own")


def train_to_collapse(steps, **arguments):
    """Train a network whose squared error overflows in FP16, with LossScaleMonitor."""
    layers = [nn.Dense(4, 4, "ones").to_float(mstype.float16), nn.Dense(4, 1, "ones").to_float(mstype.float16)]
    network = nn.WithLossCell(nn.SequentialCell(*layers), nn.MSELoss())
    features = np.full((steps, 1, 4), 6e3, np.float32) + np.arange(steps, dtype=np.float32)[:, None, None]
    monitor = LossScaleMonitor("record.jsonl", max_consecutive_overflows=3, **arguments)
    return train(train_step_of(network), (features, np.zeros((steps, 1, 1), np.float32)), monitor)


def test_columns_keep_their_order_however_many_they_are(tmp_path):
    # Sorted as text, the batch's column_10 would come before column_2.
    save_batch(tmp_path / "batch.npz", [np.full(2, number) for number in range(12)])
    assert [column[0] for column in read_batch(tmp_path / "batch.npz")] == list(range(12))


def test_first_bad_loss_is_explained_at_its_batch_and_weights(mindformers_log, tmp_path):
    train_step = train_to_collapse(7, explain=True)
    lines = [line for line in mindformers_log.text.splitlines() if "Why it overflows" in line]
    assert len(lines) == 1
    explanation = json.loads((tmp_path / "overflow_explanation.json").read_text())
    assert explanation["origin"]["phase"] == "forward"
    assert explanation["origin"]["layer"] == "1"
    # The monitor saves the first batch whose loss is inf, not the batch of the later step at which it reports the
    # collapse.
    batch = read_batch(tmp_path / "overflow_batch.npz")
    np.testing.assert_array_equal(batch[0], np.full((1, 4), 6000, np.float32))
    assert batch[1].shape == (1, 1)
    again = explain_overflow(train_step, [tuple(map(Tensor, batch))], 256.0)
    assert again.to_dict()["origin"] == explanation["origin"]
    # Every function that takes batches also takes the path of the saved batch.
    assert explain_overflow(train_step, "overflow_batch.npz", 256.0).to_dict() == again.to_dict()
    assert gradient_ranges(train_step, tmp_path / "overflow_batch.npz", [256.0]).overflowed_batches(256.0) == 1


def test_nothing_is_explained_unless_asked_for(mindformers_log, tmp_path):
    train_to_collapse(4)
    assert {file.name for file in tmp_path.glob("*.*")} == {"record.jsonl"}
    assert "Loss scaling has collapsed" in mindformers_log.text
    with pytest.raises(TypeError, match="'explain' must be"):
        LossScaleMonitor(explain="yes")


class Harmful:
    def __reduce__(self):
        return (open, ("harmed", "w"))


def test_files_without_a_batch_are_refused_and_nothing_is_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no 'none.npz'"):
        read_batch("none.npz")
    save_batch("whole.npz", [np.arange(1000)])
    whole = (tmp_path / "whole.npz").read_bytes()
    array = np.empty(1, object)
    array[0] = Harmful()
    np.savez("objects.npz", column_0=array)
    np.savez("names.npz", other=np.ones(1))
    np.savez("empty.npz")
    with zipfile.ZipFile("bomb.npz", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("column_0.npy", b"\0" * 2**20)
    size, false_size = (number.to_bytes(4, "little") for number in (2**20, 2**32 - 1))
    content = (tmp_path / "bomb.npz").read_bytes().replace(size, false_size)
    files = {"torn.npz": whole[:500], "text.npz": b"hello", "pickle.npz": pickle.dumps(Harmful()), "bomb.npz": content}
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    for name in (*files, "objects.npz", "names.npz", "empty.npz"):
        with pytest.raises(ValueError, match=rf"'batch' must .*LossScaleMonitor.*overflow_batch\.npz.*{name}"):
            read_batch(name)
    assert not (tmp_path / "harmed").exists()

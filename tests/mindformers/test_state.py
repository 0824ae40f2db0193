"""Loading a checkpoint of MindFormers' PyNative trainer restores the state of the loss scaler from that checkpoint."""

import pytest

from mindformers_adaptive import AdaptiveLossScaler, GradientGuidedLossScaler
from mindformers_adaptive.mindformers.checkpoint_reader import write_sidecar
from mindformers_adaptive.mindformers.pynative_trainer import restore


def test_everything_that_the_scaler_has_comes_back(tmp_path):
    scaler, other = (AdaptiveLossScaler(scale, min_scale_window=2, max_scale_window=4) for scale in (2.0**16, 2.0**4))
    state = scaler.state() | {"scale_window": 4, "window_index": 2, "growth_num": 2, "cur_iter": 30, "skipped_steps": 7}
    scaler.load_state_dict(state | {"loss_scaling_run": 12})
    write_sidecar(tmp_path, state["loss_scale"], {**state, "loss_scaling_run": 12})
    restore(other, tmp_path)
    assert (other.state(), other.update_cell.run_number) == (scaler.state(), 12)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no loss_scale.json: .* did not scale the loss.* Loss scaling starts afresh"),
        ("{", "loss_scale.json cannot be used: .* Loss scaling starts afresh"),
        ('{"format": 1, "loss_scale": 0, "state": {}}', "'loss_scale' 0.0; a loss scale must be .*starts afresh"),
    ],
)
def test_without_a_state_scaling_starts_afresh_and_says_so(tmp_path, content, message):
    if content is not None:
        (tmp_path / "loss_scale.json").write_text(content)
    scaler = AdaptiveLossScaler(2.0**10)
    before = scaler.state()
    with pytest.warns(UserWarning, match=message):
        restore(scaler, tmp_path)
    assert scaler.state() == before


def test_the_state_of_another_rule_leaves_its_scale_only(tmp_path):
    write_sidecar(tmp_path, 256.0, AdaptiveLossScaler(2.0**10).state())
    scaler = GradientGuidedLossScaler(2.0**20)
    restore(scaler, tmp_path)
    assert scaler.state() == GradientGuidedLossScaler(256.0).state()

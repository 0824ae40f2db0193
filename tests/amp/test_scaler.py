"""The loss scaler: the rule in functional training, compiled and not, its arithmetic, its state in checkpoints."""

import itertools

import mindspore
import numpy as np
import pytest
from dense_network import Dense
from mindspore import Tensor, amp

from mindformers_adaptive import AdaptiveLossScaler
from mindformers_adaptive.rules.adaptive import AdaptiveRule

OVERFLOWS = (np.random.default_rng(1).random(60) < 0.25).tolist()


def adjust(scaler, overflow):
    scaler.adjust(Tensor(not overflow))


def test_scale_follows_the_rule(mode):
    options = {"min_loss_scale": 0.5, "max_loss_scale": 2.0**22, "hysteresis": 2, "shrink_from_min_window": True}
    scaler = AdaptiveLossScaler(2**20, 3, 2, 4, 1, **options)
    rule = AdaptiveRule(3, 4, 1, **options)
    state = rule.start(2**20, 2)
    for overflow in OVERFLOWS:
        adjust(scaler, overflow)
        state = rule.step(state, overflow)
        now = scaler.state()
        assert now["loss_scale"] == float(scaler.scale_value) == state.loss_scale
        assert (now["scale_window"], now["window_index"]) == (state.scale_window, state.window_index)
        assert now["skipped_steps"] == state.skipped_steps


@pytest.mark.parametrize("scale_window", [1, 3])
def test_with_one_window_it_is_the_dynamic_loss_scaler(graph_mode, scale_window):
    ours = AdaptiveLossScaler(8, 2, scale_window, scale_window, scale_window)
    stock = amp.DynamicLossScaler(8, 2, scale_window)
    for overflow in [True] * 5 + OVERFLOWS[:25]:
        adjust(ours, overflow)
        adjust(stock, overflow)
        assert float(ours.scale_value) == float(stock.scale_value)


@pytest.mark.parametrize("compiled", [True, False])
def test_training_skips_overflows_and_takes_the_other_steps_as_fp32_does(mode, compiled):
    dense = Dense()
    scaler = AdaptiveLossScaler(2**16, scale_window=20)
    scaled = functional_step(dense, scaler, compiled)
    reference = Dense()
    plain = functional_step(reference, None, compiled=False)
    rule = AdaptiveRule()
    state = rule.start(2**16)
    for overflow in (False, True, False, True, True, False):
        before = dense.weight()
        loss, grads_finite = scaled(*dense.batch(overflow))
        assert bool(grads_finite) == (not overflow)
        if overflow:
            np.testing.assert_array_equal(dense.weight(), before)
        else:
            # Scales are powers of two, so that nothing is rounded.
            assert float(loss) == float(plain(*reference.batch())[0])
            np.testing.assert_array_equal(dense.weight(), reference.weight())
            assert not np.array_equal(dense.weight(), before)
        state = rule.step(state, overflow)
        assert float(scaler.scale_value) == state.loss_scale


def functional_step(dense, scaler, compiled, needs_grads=False):
    """Return a train step that takes a batch; without a scaler, one without loss scaling."""
    optimizer = dense.optimizer()

    def forward(features, target):
        loss = dense.loss_fn(dense.layer(features), target)
        return loss if scaler is None else scaler.scale(loss)

    value_and_grad = mindspore.value_and_grad(forward, None, optimizer.parameters)

    def step(features, target):
        loss, grads = value_and_grad(features, target)
        if scaler is None:
            optimizer(grads)
            return loss, True
        grads = scaler.unscale(grads)
        grads_finite = amp.all_finite(grads)
        if grads_finite:
            optimizer(grads)
        scaler.adjust(grads_finite, grads) if needs_grads else scaler.adjust(grads_finite)
        return scaler.unscale(loss), grads_finite

    return mindspore.jit(step) if compiled else step


@pytest.mark.parametrize("exponent", [10, 16, 24, 26, 32])
def test_float16_gradient_is_divided_exactly_at_every_scale(mode, exponent):
    scaler = AdaptiveLossScaler(2**exponent)
    gradients = (Tensor(np.float16([2.0**15, -(2.0**12)])), Tensor(np.float32([2.0**15])))
    half, full = scaler.unscale(gradients)
    assert (half.dtype, full.dtype) == (mindspore.float16, mindspore.float32)
    np.testing.assert_array_equal(half.asnumpy(), np.float16([2.0 ** (15 - exponent), -(2.0 ** (12 - exponent))]))
    np.testing.assert_array_equal(full.asnumpy(), np.float32([2.0 ** (15 - exponent)]))


def test_scale_takes_a_loss_or_a_tuple_and_keeps_dtypes(mode):
    scaler = AdaptiveLossScaler(1024)
    assert float(scaler.scale(Tensor(1.5))) == 1536.0
    half, full = scaler.scale((Tensor(np.float16([1.5])), Tensor(np.float32([3.0]))))
    assert (half.dtype, float(half[0]), float(full[0])) == (mindspore.float16, 1536.0, 3072.0)


@pytest.mark.parametrize("split", [0, 17])
def test_saved_and_loaded_scaler_goes_on_as_if_it_had_never_stopped(graph_mode, tmp_path, split):
    options = {"scale_factor": 2, "scale_window": 2, "max_scale_window": 4, "min_scale_window": 1, "hysteresis": 2}
    whole, resumed = AdaptiveLossScaler(2**20, **options), AdaptiveLossScaler(2**20, **options)
    for overflow in OVERFLOWS[:split]:
        adjust(whole, overflow)
    mindspore.save_checkpoint(Dense().layer, str(tmp_path / "scaler.ckpt"), append_dict=whole.state_dict())
    resumed.load_state_dict(mindspore.load_checkpoint(str(tmp_path / "scaler.ckpt")))
    assert resumed.state() == whole.state()
    for overflow in OVERFLOWS[split:]:
        adjust(whole, overflow)
        adjust(resumed, overflow)
        assert resumed.state() == whole.state()


def test_state_goes_into_one_file_with_the_network(graph_mode, tmp_path):
    dense = Dense()
    scaler = AdaptiveLossScaler(2**20)
    adjust(scaler, True)
    file = str(tmp_path / "all.ckpt")
    mindspore.save_checkpoint(dense.layer, file, append_dict=scaler.state_dict())
    resumed = AdaptiveLossScaler(2**20)
    resumed.load_state_dict(mindspore.load_checkpoint(file))
    assert resumed.state() == scaler.state()
    assert resumed.state()["loss_scale"] == 2**19


@pytest.mark.parametrize("scale", [np.inf, np.nan, 0.0, -1.0])
def test_impossible_scale_is_refused_and_nothing_is_changed(scale):
    scaler = AdaptiveLossScaler(1024)
    before = scaler.state()
    loaded = AdaptiveLossScaler(2**16)
    adjust(loaded, True)
    with pytest.raises(ValueError, match=r"'scale' .* must be finite and above 0"):
        scaler.load_state_dict({**loaded.state_dict(), "scale": mindspore.Parameter(Tensor(scale, mindspore.float32))})
    assert scaler.state() == before


def test_scale_beyond_its_bounds_and_window_off_the_ladder_are_moved_with_a_warning():
    saved = AdaptiveLossScaler(2**20, 2, 500)
    scaler = AdaptiveLossScaler(1024, 2, 20, 100, 20, max_loss_scale=2048)
    with pytest.warns(UserWarning, match="The checkpoint has") as caught:
        scaler.load_state_dict(saved.state_dict())
    assert scaler.state()["loss_scale"] == 2048
    assert scaler.state()["scale_window"] == 100
    messages = [str(warning.message) for warning in caught]
    assert any("'scale' 1048576.0" in message for message in messages)
    assert any("'scale_window' 500" in message for message in messages)


def test_what_a_checkpoint_lacks_is_named():
    scaler = AdaptiveLossScaler(1024)
    with pytest.warns(UserWarning, match="has no window_index, growth_num, .*: what it lacks stays as it is"):
        scaler.load_state_dict({"scale": mindspore.Parameter(Tensor(64.0)), "scale_window": 20})
    assert scaler.state()["loss_scale"] == 64


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scale_value": None}, TypeError, "'scale_value' must be a number"),
        ({"scale_value": float("nan")}, ValueError, "'scale_value' must be finite"),
        ({"scale_value": 1024, "max_loss_scale": 512}, ValueError, "'scale_value' must lie between"),
        ({"scale_value": 1024, "scale_factor": "2"}, TypeError, "'scale_factor'"),
        ({"scale_value": 1024, "hysteresis": True}, TypeError, "'hysteresis'"),
        ({"scale_value": 1024, "growth_interval": 20}, TypeError, "growth_interval"),
    ],
)
def test_bad_argument_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        AdaptiveLossScaler(**arguments)


def test_every_argument_of_the_rule_is_taken():
    for low, high in itertools.pairwise((1.0, 2.0, 4.0)):
        scaler = AdaptiveLossScaler(low, min_loss_scale=low, max_loss_scale=high)
        assert (scaler.update_cell.rule.min_loss_scale, scaler.update_cell.rule.max_loss_scale) == (low, high)

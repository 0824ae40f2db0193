"""The loss scaler in functional training, compiled or not: it follows the rule and keeps its state in checkpoints."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

from mindformers_adaptive import AdaptiveLossScaler
from tests.shared.every_rule import KINDS, adjust
from tests.shared.networks import Dense, functional_step

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("mode", "name", "compiled"),
    [
        ("graph", "adaptive", True),
        ("graph", "guided", False),
        ("pynative", "guided", True),
        ("pynative", "log_max", False),
    ],
    indirect=["mode"],
)
def test_overflows_are_skipped_and_other_steps_are_as_in_fp32(mode, compiled, name):
    kind, dense, reference = KINDS[name], Dense(), Dense()
    scaler = kind.scaler(loss_scale=2.0**16)
    scaled = functional_step(dense, scaler, compiled)
    plain = functional_step(reference, None, compiled=False)
    state = kind.rule.start(2.0**16)
    for overflow in (False, True, False, True, True, False):
        before = dense.weight()
        loss, grads_finite = scaled(*dense.batch(overflow))
        assert bool(grads_finite) == (not overflow)
        if overflow:
            np.testing.assert_array_equal(dense.weight(), before)
        else:
            # The loss scales are powers of two, so scaling rounds nothing.
            assert float(loss) == float(plain(*reference.batch())[0])
            np.testing.assert_array_equal(dense.weight(), reference.weight())
            assert not np.array_equal(dense.weight(), before)
        now = scaler.state()
        state = kind.rule.step(state, overflow, now.get("largest_gradient"))
        assert now["loss_scale"] == float(scaler.scale_value) == state.loss_scale
        assert np.isinf(now.get("largest_gradient", 0)) == (overflow and name != "adaptive")


def test_adjust_measures_one_gradient_or_several(graph_mode):
    scaler = KINDS["guided"].scaler()
    # Tensor(-4.0) has the shape ().
    several = {5.0: (Tensor([1.0]), Tensor([[-5.0]])), 6.0: [Tensor([-6.0])]}
    for largest, grads in ({3.0: Tensor(np.float16([-3.0])), 4.0: Tensor(-4.0)} | several).items():
        adjust(scaler, Tensor(True), grads)
        assert scaler.state()["largest_gradient"] == largest
    assert scaler.state()["cur_iter"] == 5


@pytest.mark.parametrize(
    ("grads_finite", "grads", "message"),
    [
        (True, (Tensor([1.0]),), "'grads_finite' must be a Tensor .*all_finite"),
        (np.bool_(True), (Tensor([1.0]),), "'grads_finite' must be a Tensor .*all_finite"),
        *(
            (Tensor(True), grads, "'grads' must be .* in one flat tuple, without None")
            for grads in (None, (), (None,), (Tensor([1.0]), None), (Tensor([1.0]), (Tensor([2.0]),)), (np.ones(2),))
        ),
    ],
)
def test_adjust_refuses_what_it_cannot_measure(grads_finite, grads, message):
    scaler = KINDS["guided"].scaler()
    before = scaler.state()
    with pytest.raises(TypeError, match=message):
        scaler.adjust(grads_finite, grads)
    assert scaler.state() == before


@pytest.mark.parametrize("method", ["scale", "unscale"])
def test_missing_gradient_is_named_by_its_position(graph_mode, method):
    scaler = AdaptiveLossScaler(2**10)
    for compiled in (False, True):
        call = getattr(scaler, method)
        call = mindspore.jit(call) if compiled else call
        for inputs in ((Tensor([1.0]), None), [Tensor([1.0]), None]):
            with pytest.raises(TypeError, match=r"\[1\] is None.*Leave this Parameter out"):
                call(inputs)


@pytest.mark.parametrize(("name", "mode"), [("adaptive", "graph"), ("guided", "pynative")], indirect=["mode"])
def test_adjust_is_refused_without_unscale_and_twice_after_one(mode, name):
    kind = KINDS[name]
    scaler, gradient = kind.scaler(), (Tensor([1.0]),)
    before = scaler.state_dict()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"once per training step.*unscale.*combine the flags"):
            scaler.adjust(Tensor(True), gradient)
    assert scaler.state_dict() == before
    for _ in range(3):
        scaler.unscale(Tensor([1.0]))
        scaler.unscale((Tensor([1.0]), Tensor([2.0])))
        scaler.adjust(Tensor(True), gradient)
    before = scaler.state_dict()
    with pytest.raises(RuntimeError, match=r"once per training step"):
        scaler.adjust(Tensor(True), gradient)
    assert scaler.state_dict() == before
    # The next step goes on as if there had been no mistake.
    scaler.unscale(gradient)
    scaler.adjust(Tensor(True), gradient)
    assert scaler.state_dict()["cur_iter"] == before["cur_iter"] + 1


@pytest.mark.parametrize("compiled", ["unscale", "adjust"])
def test_the_order_of_compiled_calls_is_not_checked(mode, compiled):
    """A function may compile one of the two calls only, and Python sees the other one."""
    scaler = AdaptiveLossScaler(2**10)
    unscale, adjust = scaler.unscale, scaler.adjust
    if compiled == "unscale":
        unscale = mindspore.jit(unscale)
    else:
        adjust = mindspore.jit(adjust)
    for _ in range(3):
        unscale(Tensor([1.0]))
        adjust(Tensor(True))
    assert scaler.state()["cur_iter"] == 4


def test_scale_takes_a_loss_or_a_tuple_and_keeps_dtypes(mode):
    scaler = AdaptiveLossScaler(1024)
    assert float(scaler.scale(Tensor(1.5))) == 1536.0
    half, full = scaler.scale((Tensor(np.float16([1.5])), Tensor(np.float32([3.0]))))
    assert (half.dtype, float(half[0]), float(full[0])) == (mindspore.float16, 1536.0, 3072.0)


def test_state_goes_into_one_file_with_the_network(graph_mode, tmp_path):
    dense = Dense()
    scaler = AdaptiveLossScaler(2**20)
    adjust(scaler, Tensor(False))
    file = str(tmp_path / "all.ckpt")
    mindspore.save_checkpoint(dense.layer, file, append_dict=scaler.state_dict())
    resumed = AdaptiveLossScaler(2**20)
    resumed.load_state_dict(mindspore.load_checkpoint(file))
    assert resumed.state() == scaler.state()
    assert resumed.state()["loss_scale"] == 2**19

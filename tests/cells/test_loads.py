"""A checkpoint that is loaded into a training that runs: the next steps go on from the checkpoint."""

import contextlib
import copy
import functools
import gc
import itertools
import warnings
import weakref

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.train import Callback, Model

from mindformers_adaptive import (
    AdaptiveLossScaleManager,
    AdaptiveLossScaler,
    AdaptiveLossScaleUpdateCell,
    FixedScaleTrainOneStepCell,
    GradientGuidedLossScaler,
    GradientGuidedLossScaleUpdateCell,
    build_train_network,
)
from mindformers_adaptive.wrapper import MFTrainOneStepCell, TrainOneStepWithLossScaleCell
from tests.cells.loading import LOADS, VIEWS, Outer, as_checkpoint, values_of
from tests.shared.networks import Dense, functional_step, resettable

pytestmark = pytest.mark.slow


class WithAverage(TrainOneStepWithLossScaleCell):
    """A user's train step, which keeps a moving average of the weights and updates it in applied steps only."""

    def __init__(self, network, optimizer, scale_sense):
        super().__init__(network, optimizer, scale_sense)
        self.average = self.weights.clone("average")
        self.map = ops.HyperMap()
        self.to_average = ops.partial(_average, Tensor(0.9, mindspore.float32))

    def construct(self, *inputs):
        loss = self.network(*inputs)
        status, scale = self.start_overflow_check(loss, self.scale_sense)
        sens = ops.ones_like(loss) * ops.cast(scale, loss.dtype)
        grads = self.grad(self.network, self.weights)(*inputs, sens)
        grads = self.map(ops.partial(_divide, scale), grads)
        overflow = self.process_loss_scale(self.get_overflow_status(status, grads))
        if not overflow:
            loss = ops.depend(loss, self.optimizer(grads))
            loss = ops.depend(loss, self.map(self.to_average, self.average, self.weights))
        return loss, overflow, scale


def _divide(scale, gradient):
    return gradient / scale


def _average(decay, average, weight):
    return ops.assign(average, average * decay + weight * (1 - decay))


def adaptive():
    return AdaptiveLossScaleUpdateCell(2.0**12, 2, 2, max_scale_window=4, min_scale_window=1)


def of_cell(scale_sense, cell=TrainOneStepWithLossScaleCell, optimizer="Momentum", **options):
    dense = Dense()
    return cell(dense.network, dense.optimizer(optimizer), scale_sense=scale_sense(), **options)


def of_manager(manager):
    dense = Dense()
    return build_train_network(dense.layer, dense.optimizer(), dense.loss_fn, loss_scale_manager=manager)


def fixed_without_skipping():
    dense = Dense()
    return FixedScaleTrainOneStepCell(dense.network, dense.optimizer(), 256.0)


WAYS = {
    "adaptive": lambda: of_cell(adaptive),
    "guided": lambda: of_cell(lambda: GradientGuidedLossScaleUpdateCell(2.0**12), optimizer="Adam"),
    "fixed cell": lambda: of_cell(lambda: nn.FixedLossScaleUpdateCell(256.0)),
    "dynamic": lambda: of_cell(lambda: nn.DynamicLossScaleUpdateCell(2.0**12, 2, 3)),
    "FixedScaleTrainOneStepCell": fixed_without_skipping,
    "MFTrainOneStepCell": lambda: of_cell(adaptive, MFTrainOneStepCell, "AdamWeightDecay", use_clip_grad=True),
    "own train step": lambda: of_cell(adaptive, WithAverage),
    "fixed manager": lambda: of_manager(amp.FixedLossScaleManager(1.0, drop_overflow_update=False)),
}
OVERFLOWS = [False, False, True, False, False, True, False]


def take(step, overflows):
    for overflow in overflows:
        step(*Dense.batch(overflow))


def assert_same(values, expected):
    assert values.keys() == expected.keys()
    assert [name for name in values if not np.array_equal(values[name], expected[name], equal_nan=True)] == []


@pytest.mark.parametrize(
    ("way", "mode"),
    [
        *((way, "graph") for way in WAYS),
        *((way, "pynative") for way in ("adaptive", "MFTrainOneStepCell", "own train step")),
    ],
    indirect=["mode"],
)
def test_a_training_goes_back_to_a_checkpoint(mode, way, tmp_path):
    step = reset_of(mode)() if way == "adaptive" else WAYS[way]().set_train()
    file = str(tmp_path / "saved.ckpt")
    # An overflow that is not skipped leaves no number to compare.
    skips = way not in ("FixedScaleTrainOneStepCell", "fixed manager")
    overflows = OVERFLOWS if skips else [False] * len(OVERFLOWS)
    take(step, overflows[:3])
    mindspore.save_checkpoint(step, file)
    saved = values_of(step)
    take(step, overflows[3:])
    end = values_of(step)
    assert not np.array_equal(saved["weight"], end["weight"])
    for _ in range(2):
        mindspore.load_param_into_net(step, mindspore.load_checkpoint(file))
        assert_same(values_of(step), saved)
        take(step, overflows[3:])
        assert_same(values_of(step), end)


@functools.cache
def reset_of(mode, number=0):
    """Return the function that returns an adaptive train step at its start, whose graphs are compiled once."""
    return resettable(WAYS["adaptive"]().set_train())


@pytest.fixture
def step(mode):
    return reset_of(mode)()


@pytest.fixture
def twins(graph_mode):
    """Return two equal train steps at their start."""
    return [reset_of("graph", number)() for number in (0, 1)]


def write(step, values):
    """Write values into the memory that the step's graph uses, which is no load."""
    for parameter in step.get_parameters():
        parameter.copy_(Tensor(values[parameter.name]))


@pytest.mark.parametrize("part", ["network", "optimizer"])
def test_a_part_of_a_training_goes_back_to_a_checkpoint(twins, part):
    step, reference = twins
    take(step, OVERFLOWS[:3])
    saved = as_checkpoint(values_of(getattr(step, part)))
    take(step, OVERFLOWS[3:])
    mindspore.load_param_into_net(getattr(step, part), saved)
    write(reference, values_of(step))
    for each in twins:
        take(each, OVERFLOWS)
    assert_same(values_of(step), values_of(reference))


class GoesBack(Callback):
    """Saves the training after step 2 and goes back to it after step 4."""

    def on_train_step_end(self, run_context):
        arguments = run_context.original_args()
        if arguments.cur_step_num == 2:
            self.saved = values_of(arguments.train_network)
        if arguments.cur_step_num == 4:
            self.reached = values_of(arguments.train_network)
            mindspore.load_param_into_net(arguments.train_network, as_checkpoint(self.saved))


@pytest.mark.parametrize("sink", [False, True])
def test_a_callback_goes_back_to_a_checkpoint(graph_mode, scaling_on_cpu, sink):
    dense, callback = Dense(), GoesBack()
    model = Model(
        dense.layer, dense.loss_fn, dense.optimizer(), loss_scale_manager=AdaptiveLossScaleManager(2.0**12, 2, 20)
    )
    same = Dense.batch()
    data = mindspore.dataset.NumpySlicesDataset(
        tuple(np.tile(tensor.asnumpy(), (6, 1)) for tensor in same), shuffle=False
    ).batch(3)
    model.train(1, data, callbacks=callback, dataset_sink_mode=sink, sink_size=1 if sink else -1)
    assert_same(values_of(model.train_network), callback.reached)


def test_a_training_with_a_copied_update_cell_goes_back(graph_mode):
    first = WAYS["adaptive"]().set_train()
    take(first, OVERFLOWS[:3])
    step = of_cell(lambda: copy.deepcopy(first.loss_scaling_manager)).set_train()
    take(step, OVERFLOWS[:3])
    saved = as_checkpoint(values_of(step))
    take(step, OVERFLOWS[3:])
    end = values_of(step)
    mindspore.load_param_into_net(step, saved)
    take(step, OVERFLOWS[3:])
    assert_same(values_of(step), end)


def test_a_copy_of_an_update_cell_checks_what_is_loaded(graph_mode):
    cell = copy.deepcopy(adaptive())
    mindspore.load_param_into_net(cell, {"list_index": Parameter(Tensor(99, mindspore.int32), name="list_index")})
    with pytest.warns(UserWarning, match="window"):
        cell.check_state()
    assert cell.state()["window_index"] == 1


def test_a_state_loaded_in_mid_run_is_checked_at_the_next_step(twins):
    step = twins[0]
    take(step, OVERFLOWS)
    mindspore.load_param_into_net(step, {"list_index": Parameter(Tensor(99, mindspore.int32), name="list_index")})
    with pytest.warns(UserWarning, match="window"):
        take(step, [False])
    # The next steps check nothing: what training computed is no load.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take(step, OVERFLOWS)


def test_a_fixed_scale_stays_after_a_load_in_mid_run(mode):
    step = WAYS["fixed cell"]().set_train()
    take(step, OVERFLOWS)
    mindspore.load_param_into_net(step, {"scale_sense": Parameter(Tensor(64.0), name="scale_sense")})
    with pytest.warns(UserWarning, match="fixed at 256"):
        take(step, [False])
    assert float(step.scale_sense) == 256
    # The check of a load reads the device, so a load is checked before the next step only.
    assert step.loaded == set()


def test_a_learning_rate_that_is_set_is_used_in_the_next_step(twins):
    """Not only checkpoints are loaded by ``set_data``."""
    step, reference = twins
    take(step, OVERFLOWS)
    step.optimizer.learning_rate.set_data(Tensor(0.5, mindspore.float32))
    write(reference, values_of(step))
    for each in twins:
        take(each, [False])
    assert_same(values_of(step), values_of(reference))


def test_a_load_that_changes_the_shape_is_said(graph_mode):
    step = WAYS["adaptive"]().set_train()
    take(step, [False])
    step.weights[0].set_data(Tensor(np.ones((2, 9), np.float32)), slice_shape=True)
    with pytest.warns(UserWarning, match=r"'weight'.*old values.*new train-step cell"), contextlib.suppress(Exception):
        take(step, [False])


def test_what_was_kept_stays_when_other_weights_are_set(step):
    for steps, keep in itertools.product((0, 3), VIEWS.values()):
        take(step, [False] * steps)
        true, shared = values_of(step), {each.name: keep(each) for each in step.get_parameters()}
        other = {name: value * 0 + 1 for name, value in true.items()}
        mindspore.load_param_into_net(step, as_checkpoint(other))
        assert_same(values_of(step), other)
        arrays = {name: value if isinstance(value, np.ndarray) else value.asnumpy() for name, value in shared.items()}
        assert_same(arrays, true)
        mindspore.load_param_into_net(step, as_checkpoint(arrays))
        assert_same(values_of(step), true)


def test_a_load_is_seen_by_a_step_that_is_also_in_a_graph(twins):
    step, reference = WAYS["adaptive"]().set_train(), twins[0]
    outer = Outer(step)
    take(step, OVERFLOWS[:3])
    saved = values_of(step)
    take(outer, OVERFLOWS[3:])
    mindspore.load_param_into_net(step, as_checkpoint(saved))
    write(reference, saved)
    for each in (outer, reference):
        take(each, OVERFLOWS)
    assert_same(values_of(step), values_of(reference))


class Fails(nn.Cell):
    """A network whose forward pass raises an exception for batches of another size than 4."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 2, "ones")

    def construct(self, x, target):
        outputs = self.dense(x)
        if x.shape[0] != 4:
            raise ValueError("a batch of another size")
        return ((outputs - target) ** 2).mean()


def gradients_of(network, *batch):
    return mindspore.value_and_grad(network, None, network.trainable_params())(*batch)


FAILED_PASSES = {
    "step": lambda step, *batch: step(*batch),
    "network": lambda step, *batch: step.network(*batch),
    "gradients": lambda step, *batch: gradients_of(step.network, *batch),
    "another network": lambda step, *batch: gradients_of(Fails(), *batch),
}


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_a_training_after_a_failed_pass_is_applied(mode):
    """MindSpore would take the next forward pass for a part of the one that failed."""
    batch = Tensor(np.ones((4, 3), np.float32)), Tensor(np.zeros((4, 2), np.float32))
    networks = Fails(), Fails()
    first, second = (
        MFTrainOneStepCell(
            network,
            nn.AdamWeightDecay(network.trainable_params(), 0.05),
            scale_sense=GradientGuidedLossScaleUpdateCell(2.0**8),
        ).set_train()
        for network in networks
    )
    for failed, fail in FAILED_PASSES.items():
        first(*batch)
        with pytest.raises(ValueError, match="another size"):
            fail(first, batch[0][:2], batch[1][:2])
        for _ in range(2):
            for step, network in ((second, networks[1]), (first, networks[0])):
                before = int(step.optimizer.global_step.asnumpy()[0]), network.dense.weight.asnumpy().copy()
                step(*batch)
                assert int(step.optimizer.global_step.asnumpy()[0]) == before[0] + 1, failed
                assert not np.array_equal(network.dense.weight.asnumpy(), before[1]), failed


def test_a_training_goes_back_by_every_way_to_load(step):
    take(step, OVERFLOWS[:3])
    saved = values_of(step)
    take(step, OVERFLOWS[3:])
    end = values_of(step)
    assert not np.array_equal(saved["weight"], end["weight"])
    for load in LOADS.values():
        load(step, {name: Tensor(value) for name, value in saved.items()})
        assert_same(values_of(step), saved)
        take(step, OVERFLOWS[3:])
        assert_same(values_of(step), end)


def test_a_damaged_state_is_checked_however_it_was_loaded(twins):
    step = twins[0]
    take(step, OVERFLOWS)
    # As parameter.data = value: no method of the Parameter is called.
    Tensor.assign_value(step.parameters_dict()["list_index"], Tensor(99, mindspore.int32))
    with pytest.warns(UserWarning, match="window"):
        take(step, [False])
    assert step.loss_scaling_manager.state()["window_index"] <= 2


@pytest.mark.parametrize(
    ("make", "mode"),
    [(GradientGuidedLossScaler, "graph"), (AdaptiveLossScaler, "pynative")],
    indirect=["mode"],
)
def test_a_scaler_names_the_remedy_that_goes_back(mode, make):
    dense, scaler = Dense(), make(2.0**12)
    optimizer = dense.optimizer()
    step = functional_step(dense, scaler, compiled=True, optimizer=optimizer)
    take(step, OVERFLOWS[:3])
    state, saved = scaler.state_dict(), values_of(optimizer)
    take(step, OVERFLOWS[3:])
    end = values_of(optimizer), scaler.state_dict()
    with pytest.warns(UserWarning, match=r"after it has taken steps.*copy_"):
        scaler.load_state_dict(state)
    for parameter in optimizer.get_parameters():
        parameter.copy_(Tensor(saved[parameter.name]))
    take(step, OVERFLOWS[3:])
    assert_same(values_of(optimizer), end[0])
    assert scaler.state_dict() == end[1]


def test_a_load_in_another_packages_train_step_is_said(graph_mode):
    cell, dense = adaptive(), Dense()
    step = nn.TrainOneStepWithLossScaleCell(dense.network, dense.optimizer(), cell)
    step.ascend_910b_target, step.enable_allfinite = True, False
    saved = as_checkpoint(values_of(step))
    # Before the first step, a load needs no warning.
    mindspore.load_param_into_net(step, saved)
    step.set_train()
    take(step, OVERFLOWS)
    with pytest.warns(UserWarning, match=r"taken steps.*new training step") as caught:
        mindspore.load_param_into_net(step, saved)
    assert len(caught) == 1


def test_parameters_keep_no_train_step_alive(graph_mode):
    dense = Dense()
    steps = [TrainOneStepWithLossScaleCell(dense.network, dense.optimizer(), adaptive()).set_train() for _ in range(3)]
    cells = weakref.WeakSet(steps)
    del steps
    gc.collect()
    assert not cells


def doors(step):
    """Return the loss scale of the next step from each name under which a train step has it."""
    cell = step.loss_scaling_manager
    state = cell.rule_state()
    scales = [cell.get_loss_scale(), cell.loss_scale_value, cell.state()["loss_scale"], cell.known_loss_scale()]
    return {*scales, cell.state_dict()["scale"], 1 / cell.inv_scale, state.loss_scale, float(step.scale_sense)}


@pytest.mark.parametrize(
    ("way", "moment"),
    [
        ("adaptive", "before set_train"),
        ("guided", "after set_train"),
    ],
)
def test_every_door_has_the_same_loss_scale(graph_mode, way, moment):
    step = WAYS[way]()
    assert doors(step) == {2.0**12}
    if moment == "after set_train":
        step.set_train()
    # Load a checkpoint before the first step, and another one in mid-run.
    for loaded in (2.0**5, 2.0**6):
        counters = {"current_iterator_step": 501, "last_overflow_iterator_step": 500}
        checkpoint = {name: Parameter(Tensor(count, mindspore.int32), name=name) for name, count in counters.items()}
        checkpoint["scale_sense"] = Parameter(Tensor(loaded, mindspore.float32), name="scale_sense")
        mindspore.load_param_into_net(step, checkpoint)
        assert doors(step) == {loaded}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step.set_train()
        assert doors(step) == {loaded}
        take(step, [True])
        assert doors(step) == {float(step.scale_sense)} != {loaded}
        take(step, [False])
    step.loss_scaling_manager.load_state({"loss_scale": 2.0**7})
    assert doors(step) == {2.0**7}


def test_a_manager_and_a_scaler_have_their_cells_scale(graph_mode):
    manager, scaler = AdaptiveLossScaleManager(2.0**12), AdaptiveLossScaler(2.0**12)
    step = of_manager(manager)
    mindspore.load_param_into_net(step, {"scale_sense": Parameter(Tensor(2.0**5, mindspore.float32))})
    assert {manager.get_loss_scale(), *doors(step)} == {2.0**5}
    scaler.scale_value.set_data(Tensor(2.0**5, mindspore.float32))
    assert {scaler.update_cell.get_loss_scale(), scaler.state()["loss_scale"], 1 / scaler.inv_scale} == {2.0**5}

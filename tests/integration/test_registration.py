"""``register()`` puts this package's classes where MindFormers looks up those that a YAML file names."""

import inspect
import json

import mindformers.wrapper
import pytest
from mindformers.wrapper import build_wrapper
from mindspore import nn

from mindformers_adaptive import register, wrapper

STOCK = {
    "AdaptiveLossScaleUpdateCell": mindformers.wrapper.AdaptiveLossScaleUpdateCell,
    "MFPipelineWithLossScaleCell": mindformers.wrapper.MFPipelineWithLossScaleCell,
    "MFTrainOneStepCell": mindformers.wrapper.MFTrainOneStepCell,
    "TrainOneStepWithLossScaleCell": nn.TrainOneStepWithLossScaleCell,
}
# These have no counterparts of their names in MindFormers.
NEW = ("GradientGuidedLossScaleUpdateCell", "NoLossScaleUpdateCell", "RuleLossScaleUpdateCell")
SCALE_SENSE = {"type": "AdaptiveLossScaleUpdateCell", "loss_scale_value": 1024, "scale_factor": 2, "scale_window": 20}


@pytest.fixture
def registered(registry_put_back):
    """Register for one test."""
    register()


# In a process of its own, because there nothing has been registered yet.
WATCH_THE_REGISTRY = """
import json
import mindformers
from mindformers.tools.register import MindFormerRegister

def snapshot():
    wrappers = MindFormerRegister.registry["wrapper"]
    return {name: f"{cell.__module__}.{cell.__qualname__}" for name, cell in wrappers.items()}

stock = snapshot()
from mindformers_adaptive import register, wrapper
imported = snapshot()
register()
once, once_names = snapshot(), dict(MindFormerRegister.search_names_map)
register()
assert (once, once_names) == (snapshot(), MindFormerRegister.search_names_map), "register() is not idempotent"
print("SNAPSHOTS", json.dumps([stock, imported, once]))
"""


def full_name(cell):
    return f"{cell.__module__}.{cell.__qualname__}"


def test_register_alone_replaces_each_stock_class_under_all_its_names(run_python):
    output = run_python("-c", WATCH_THE_REGISTRY).stdout
    stock, imported, once = json.loads(output.partition("SNAPSHOTS")[2])
    ours = {full_name(cell): full_name(getattr(wrapper, name)) for name, cell in STOCK.items()}
    assert imported == stock
    replaced = {name: ours.get(cell, cell) for name, cell in stock.items()}
    assert once == {**replaced, **{name: full_name(getattr(wrapper, name)) for name in NEW}}
    assert len(set(once.values()) & set(ours.values())) == len(STOCK)


@pytest.mark.parametrize("name", ["MFPipelineWithLossScaleCell", "MFTrainOneStepCell", "TrainOneStepWithLossScaleCell"])
def test_a_wrapper_is_a_subclass_of_the_stock_one_with_the_same_signature(name):
    ours, stock = getattr(wrapper, name), STOCK[name]
    assert issubclass(ours, stock)
    assert ours is not stock
    assert inspect.signature(ours) == inspect.signature(stock)
    assert inspect.signature(ours.construct) == inspect.signature(stock.construct)


def test_the_update_cell_takes_the_arguments_of_the_stock_one_and_further_ones_by_keyword():
    ours = list(inspect.signature(wrapper.AdaptiveLossScaleUpdateCell).parameters.values())
    stock = list(inspect.signature(STOCK["AdaptiveLossScaleUpdateCell"]).parameters.values())
    assert ours[: len(stock)] == stock
    for further in ours[len(stock) :]:
        assert further.kind is further.KEYWORD_ONLY
        assert further.default is not further.empty
    assert issubclass(wrapper.AdaptiveLossScaleUpdateCell, nn.DynamicLossScaleUpdateCell)


@pytest.mark.parametrize("name", ["MFTrainOneStepCell", "mf_wrapper"])
def test_mindformers_builds_our_cells_from_a_config(registered, name):
    network = nn.Dense(2, 1)
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.1)
    cell = build_wrapper(
        {"type": name, "scale_sense": {**SCALE_SENSE, "hysteresis": 3, "max_scale_window": 50}},
        default_args={"network": network, "optimizer": optimizer, "parallel_config": None},
    )
    assert type(cell) is wrapper.MFTrainOneStepCell
    assert type(cell.loss_scaling_manager) is wrapper.AdaptiveLossScaleUpdateCell
    assert cell.loss_scaling_manager.rule.hysteresis == 3
    assert cell.loss_scaling_manager.rule.ladder == (20, 30, 40, 50)


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        ({"scale_windw": 20}, TypeError, r"^AdaptiveLossScaleUpdateCell: .* keyword argument 'scale_windw'"),
        ({"scale_factor": 1}, ValueError, r"^AdaptiveLossScaleUpdateCell: 'scale_factor' must be .* but got 1"),
    ],
)
def test_a_mistake_in_scale_sense_is_named_by_mindformers_error(registered, mistake, error, message):
    config = {"type": "MFTrainOneStepCell", "scale_sense": {**SCALE_SENSE, **mistake}}
    with pytest.raises(error, match=message):
        build_wrapper(config)

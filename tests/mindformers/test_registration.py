"""``register()`` puts this package's classes where MindFormers looks up the classes that a YAML file names."""

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
SCALE_SENSE = {"type": "AdaptiveLossScaleUpdateCell", "loss_scale_value": 1024, "scale_factor": 2, "scale_window": 20}


# This code runs in a separate process, in which MindFormers and this package may be imported, and register() was not
# called yet.
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


def test_register_alone_replaces_each_stock_class(run_forked, tmp_path):
    (tmp_path / "watch.py").write_text(WATCH_THE_REGISTRY)
    output = run_forked(tmp_path / "watch.py").stdout
    stock, imported, once = json.loads(output.partition("SNAPSHOTS")[2])
    ours = {full_name(cell): full_name(getattr(wrapper, name)) for name, cell in STOCK.items()}
    # Importing this package registers nothing.
    assert imported == stock
    assert not any(cell.startswith("mindformers_adaptive") for cell in stock.values())
    replaced = {name: ours.get(cell, cell) for name, cell in stock.items()}
    # Some classes of this package replace no class of MindFormers, so register() adds their names.
    added = {name: full_name(getattr(wrapper, name)) for name in wrapper.__all__}
    for name in ("AdaptiveLossScale", "GradientGuidedLossScale"):
        added[name] = added[f"{name}UpdateCell"]
    assert once == {**replaced, **added}
    assert len(set(once.values()) & set(ours.values())) == len(STOCK)


@pytest.mark.parametrize("name", ["MFPipelineWithLossScaleCell", "MFTrainOneStepCell", "TrainOneStepWithLossScaleCell"])
def test_wrapper_is_a_subclass_with_the_same_arguments(name):
    ours, stock = getattr(wrapper, name), STOCK[name]
    assert issubclass(ours, stock)
    assert ours is not stock
    # Compare only the named parameters. The cell passes on further parameters, which differ between versions of
    # MindFormers.
    written = [
        it for it in inspect.signature(ours).parameters.values() if it.kind not in (it.VAR_POSITIONAL, it.VAR_KEYWORD)
    ]
    of_stock = list(inspect.signature(stock).parameters.values())
    assert [(it.name, it.default) for it in written] == [(it.name, it.default) for it in of_stock[: len(written)]]
    assert inspect.signature(ours.construct) == inspect.signature(stock.construct)


def test_update_cell_takes_the_stock_arguments_and_more():
    ours = list(inspect.signature(wrapper.AdaptiveLossScaleUpdateCell).parameters.values())
    stock = list(inspect.signature(STOCK["AdaptiveLossScaleUpdateCell"]).parameters.values())
    # MindFormers' own cell has no type annotations, so leave the annotations out.
    assert [it.replace(annotation=it.empty) for it in ours[: len(stock)]] == stock
    for further in ours[len(stock) :]:
        assert further.kind is further.KEYWORD_ONLY
        assert further.default is not further.empty
    assert issubclass(wrapper.AdaptiveLossScaleUpdateCell, nn.DynamicLossScaleUpdateCell)


def test_a_mistake_in_scale_sense_is_named_by_mindformers_error(registry_put_back):
    register()
    config = {"type": "MFTrainOneStepCell", "scale_sense": {**SCALE_SENSE, "scale_factor": 1}}
    with pytest.raises(ValueError, match=r"^AdaptiveLossScaleUpdateCell: 'scale_factor' must be .* but got 1"):
        build_wrapper(config)

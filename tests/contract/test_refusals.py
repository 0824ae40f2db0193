"""Every rule rejects settings that cannot work, with a message that names settings that work."""

import warnings
from typing import ClassVar

import mindspore
import numpy as np
import pytest
from log_max import LogMaxRule
from mindspore import Parameter, Tensor, nn
from mindspore.train import Model

from mindformers_adaptive import (
    AdaptiveLossScaleManager,
    AdaptiveLossScaler,
    AdaptiveLossScaleUpdateCell,
    RuleLossScaleManager,
    RuleLossScaler,
    RuleLossScaleUpdateCell,
    build_train_network,
)
from mindformers_adaptive.rules import Rule, float32
from tests.shared.every_rule import KINDS
from tests.shared.networks import Dense

NEEDING_GRADIENTS = [name for name, kind in KINDS.items() if kind.rule_class.needs_gradients]


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.mark.parametrize("name", NEEDING_GRADIENTS)
def test_a_train_step_that_measures_no_gradients_is_refused(name):
    # A loss-scale manager gives its update cell to MindSpore's Model, which puts it into such a train step.
    for cell in (KINDS[name].cell(), KINDS[name].manager().get_update_cell()):
        step = Dense().train_step(cell, nn.TrainOneStepWithLossScaleCell)
        with pytest.raises(TypeError, match=r"needs a train-step cell .* of mindformers_adaptive.wrapper") as refused:
            step.set_train()
        assert "mindformers_adaptive.enable_loss_scale_in_model() before" in str(refused.value)


@pytest.mark.parametrize("name", NEEDING_GRADIENTS)
def test_an_overflow_flag_alone_is_refused(name):
    manager, scaler = KINDS[name].manager(), KINDS[name].scaler()
    with pytest.raises(RuntimeError, match=r"only the overflow flag.* Give the manager to Model"):
        manager.update_loss_scale(True)
    assert manager.get_loss_scale() == KINDS[name].loss_scale
    with pytest.raises(TypeError, match="grads"):
        scaler.adjust(Tensor(True))


def test_what_is_no_manager_is_refused_with_the_one_that_is(scaling_on_cpu, kind):
    dense, manager = Dense(), type(kind.manager()).__name__
    for not_a_manager in (kind.cell(), kind.scaler()):
        for build in (build_train_network, Model):
            with pytest.raises(TypeError, match=f"Give {manager} with the same arguments"):
                build(dense.layer, loss_fn=dense.loss_fn, optimizer=dense.optimizer(), loss_scale_manager=not_a_manager)


@pytest.mark.parametrize(
    ("owner", "name"), [("cell", "loss_scale_value"), ("manager", "init_loss_scale"), ("scaler", "scale_value")]
)
def test_a_bad_argument_is_named(kind, owner, name):
    def make(scale=1024.0, **arguments):
        made_of = {**kind.arguments, **(kind.beside if owner == "cell" else {}), name: scale, **arguments}
        return getattr(kind, f"{owner}_class")(**made_of)

    for arguments, error, message in (
        ({"scale": "2**24"}, TypeError, rf"'{name}' must be a number.* got '2\*\*24' of type str"),
        ({"scale": True}, TypeError, f"'{name}' must be a number.* got True of type bool"),
        *(
            ({"scale": scale}, ValueError, f"'{name}' must be finite .*above 0 in float32, but got {scale!r}")
            for scale in (0, -2.0, float("inf"), float("nan"), 10**400)
        ),
        ({"scale": 4, "min_loss_scale": 8}, ValueError, rf"'{name}' must lie between 'min_loss_scale' \(8\.0\) .* 4"),
        (
            {"max_loss_scale": 512},
            ValueError,
            rf"'{name}' must lie between .*loss_scale' \(512\.0\), but got 1024",
        ),
        ({"min_loss_scale": 0}, ValueError, "'min_loss_scale' must be .*above 0 .* but got 0"),
        ({"min_loss_scale": "1"}, TypeError, "'min_loss_scale' must be a number.* got '1' of type str"),
        ({"max_loss_scale": float("inf")}, ValueError, "'max_loss_scale' must be finite .* but got inf"),
        ({"min_loss_scale": 8, "max_loss_scale": 4}, ValueError, "'min_loss_scale' must not be above"),
        ({"growth_interval": 20}, TypeError, "growth_interval"),
    ):
        with pytest.raises(error, match=message):
            make(**arguments)
    rule = make(max_loss_scale=4096, min_loss_scale=2).rule
    assert (rule.min_loss_scale, rule.max_loss_scale) == (2, 4096)


@pytest.mark.parametrize(
    ("scaling_class", "argument"),
    [
        (AdaptiveLossScaleUpdateCell, "loss_scale_value"),
        (AdaptiveLossScaleManager, "init_loss_scale"),
        (AdaptiveLossScaler, "scale_value"),
    ],
)
def test_loss_scale_in_the_place_of_the_factor_is_named_once(scaling_class, argument):
    for first, second, remedy in ((2, 65536, f"{argument}=65536, scale_factor=2"), (65536, 1000, "scale_window=1000")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaling_class(first, second, 20)
        messages = [str(warning.message) for warning in caught]
        assert len(messages) == 1
        assert f"'scale_factor' of {scaling_class.__name__} is" in messages[0]
        assert remedy in messages[0]


@pytest.mark.parametrize("owner", ["rule_class", "cell_class", "manager_class", "scaler_class"])
def test_the_guided_rules_former_argument_names_the_new_one(owner):
    arguments = [] if owner == "rule_class" else [2.0**16]
    with pytest.raises(TypeError, match=r"'exchange_rate' is no longer .*'margin'"):
        getattr(KINDS["guided"], owner)(*arguments, exchange_rate=0.05)


def test_rule_and_loss_scale_in_each_others_place_are_named():
    for takes_rule in (RuleLossScaleUpdateCell, RuleLossScaleManager, RuleLossScaler):
        for loss_scale in (2**16, 65536.0, Tensor(65536.0)):
            with pytest.raises(TypeError, match=r"'rule' must be .* got .*65536.*are swapped.* the rule first"):
                takes_rule(loss_scale, "guided")
            assert takes_rule("guided", 2**16).rule.name == "guided"


def test_a_bad_argument_of_the_cell_is_named(kind, monkeypatch):
    for arguments, error, message in (
        ({"history_size": True}, TypeError, "'history_size' must be an integer.* got True of type"),
        ({"history_size": 2.0}, TypeError, "'history_size' must be an integer.* got 2.0 of type"),
        ({"history_size": -1}, ValueError, "'history_size' must be at least 0, but got -1"),
        ({"history_size": 10**6 + 1}, ValueError, "'history_size' must be .*1000000.* got 1000001"),
        ({"loss_scale": Tensor([1.0, 2.0])}, ValueError, r"'loss_scale_value' must hold one number.* \(2,\).* \(1,\)"),
        ({"loss_scale": Tensor(np.nan)}, ValueError, "'loss_scale_value' nan.* above 0.* set 'loss_scale_value'"),
    ):
        with pytest.raises(error, match=message):
            kind.cell(**arguments)
    # With MindSpore's cache of compiled graphs, a training recorded only 14 of 20 steps, and these wrongly. So a cell
    # that records steps (history_size above 0) is refused while the cache is on.
    monkeypatch.setenv("MS_COMPILER_CACHE_ENABLE", "1")
    with pytest.raises(ValueError, match=r"'history_size' must be 0 .*MS_COMPILER_CACHE_ENABLE.*but got 3"):
        kind.cell(history_size=3)
    kind.cell()
    monkeypatch.delenv("MS_COMPILER_CACHE_ENABLE")
    mindspore.set_context(enable_compile_cache=True)
    try:
        with pytest.raises(ValueError, match=r"'history_size' must be 0 .*enable_compile_cache"):
            kind.cell(history_size=3)
    finally:
        mindspore.set_context(enable_compile_cache=False)
    kind.cell(history_size=3)


@pytest.mark.parametrize("type_", [Parameter, Tensor])
@pytest.mark.parametrize("value", [4096.0, [4096.0]])
def test_initial_scale_from_a_checkpoint_is_read_and_not_saved(kind, type_, value):
    cell = kind.cell(loss_scale=type_(Tensor(value, mindspore.float32)))
    assert cell.get_loss_scale() == 4096.0
    assert cell.parameters_dict().keys() == kind.cell().parameters_dict().keys()


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        ("guidd", ValueError, r"'rule' must be 'adaptive', 'guided', or 'module.Class' .*, but got 'guidd'"),
        ("log_max.Nothing", ValueError, r"'log_max.Nothing' cannot be imported: .*has no attribute 'Nothing'"),
        (
            "log_max.float32",
            TypeError,
            r"'rule' must be .* but got 'log_max\.float32'.* subclass of .*\.rules\.Rule",
        ),
        (7, TypeError, r"'rule' must be .* but got 7"),
    ],
)
def test_what_is_no_rule_is_refused(rule, error, message):
    with pytest.raises(error, match=message):
        RuleLossScaleUpdateCell(rule, 2**10)


def test_arguments_that_the_rule_does_not_take_are_refused():
    with pytest.raises(TypeError, match=r"no argument 'margn'\. Did you mean 'margin'.* margin, share"):
        RuleLossScaleUpdateCell("log_max.LogMaxRule", 2**10, margn=2)
    with pytest.raises(TypeError, match=r"'rule' is already a rule .* margin\. .*LogMaxRule\(\.\.\.\)"):
        RuleLossScaleUpdateCell(LogMaxRule(), 2**10, margin=2)
    for rule in (LogMaxRule, LogMaxRule(margin=4.0), "log_max.LogMaxRule"):
        assert RuleLossScaleUpdateCell(rule, 2**10).rule.margin == (4.0 if isinstance(rule, LogMaxRule) else 3.0)


def test_field_named_as_an_attribute_of_the_cell_is_refused():
    class Keep(Rule):
        name = "keep"
        state: ClassVar = {"select": float32}

        def make_step(self, xp):
            return lambda loss_scale, select: {"loss_scale": loss_scale, "select": select}

    with pytest.raises(ValueError, match=r"rule 'keep' must not be called 'select'.* another name"):
        RuleLossScaleUpdateCell(Keep, 2**10)

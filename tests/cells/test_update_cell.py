"""The update cell as users meet it: arguments, Parameters, state, and its place in MindSpore's own train-step cell."""

import mindformers.wrapper
import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindformers_adaptive.cells.adaptive_update_cell import AdaptiveLossScaleUpdateCell

# The names that MindFormers' own cell writes into checkpoints, and what is new.
STOCK_NAMES = {
    "scale_window",
    "list_index",
    "scale_window_up_count",
    "scale_window_down_count",
    "current_iterator_step",
    "last_overflow_iterator_step",
}
NEW_NAMES = {"skipped_steps", "consecutive_overflows"}


def test_takes_the_call_of_mindformers_documentation():
    cell = AdaptiveLossScaleUpdateCell(1, 2, 20, 1000, 20)
    assert cell.get_loss_scale() == 1.0
    assert cell.rule.ladder == (20, 30, 40, 50, 100, 200, 500, 1000)


@pytest.mark.parametrize(
    ("hysteresis", "names"), [(1, STOCK_NAMES | NEW_NAMES), (2, STOCK_NAMES | NEW_NAMES | {"hysteresis_budget"})]
)
def test_parameters_are_untrained_int32_scalars_under_mindformers_names(hysteresis, names):
    cell = AdaptiveLossScaleUpdateCell(1024, 2, 20, hysteresis=hysteresis)
    parameters = cell.parameters_dict()
    assert set(parameters) == names
    assert {(parameter.shape, parameter.dtype) for parameter in parameters.values()} == {((), mindspore.int32)}
    assert cell.trainable_params() == []


def test_names_are_those_of_mindformers_own_cell():
    from mindformers.wrapper import AdaptiveLossScaleUpdateCell as MindFormersUpdateCell

    assert set(MindFormersUpdateCell(1024, 2, 20).parameters_dict()) == STOCK_NAMES


def test_state_is_plain_python_numbers_in_one_dict():
    state = AdaptiveLossScaleUpdateCell(1024, 2, 50).state()
    assert state == {
        "scale_window": 50,
        "window_index": 3,
        "growth_num": 0,
        "down_num": 0,
        "cur_iter": 1,
        "last_overflow_iter": 0,
        "skipped_steps": 0,
        "consecutive_overflows": 0,
    }
    assert {type(value) for value in state.values()} == {int}


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        ({"max_scale_window": 10}, r"'max_scale_window' .* but got 10: 1000 is used instead"),
        ({"max_scale_window": -1}, r"'max_scale_window' .* but got -1: 1000 is used instead"),
        ({"scale_window": 33}, r"'scale_window' must be one of the ladder .* but got 33: .* smallest window, 20"),
    ],
)
def test_input_that_is_mended_with_a_warning(arguments, warning):
    with pytest.warns(UserWarning, match=warning):
        cell = AdaptiveLossScaleUpdateCell(
            **{"loss_scale_value": 1024, "scale_factor": 2, "scale_window": 20, **arguments}
        )
    assert cell.rule.ladder[-1] == 1000
    assert cell.state()["scale_window"] == 20


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"max_scale_window": 10, "min_scale_window": 2000},
            ValueError,
            r"'max_scale_window' must be at least .* 2000",
        ),
        (
            {"max_scale_window": 1e3},
            TypeError,
            r"'max_scale_window' must be an integer .* but got 1000.0 of type float",
        ),
        ({"min_scale_window": True}, TypeError, r"'min_scale_window' must be an integer .* but got True of type bool"),
        ({"min_scale_window": 0}, ValueError, r"'min_scale_window' must be at least 1 step, but got 0"),
        ({"scale_window": "20"}, TypeError, r"'scale_window' must be an integer .* but got '20' of type str"),
        ({"scale_factor": 1}, ValueError, r"'scale_factor' must be a finite number above 1 .* but got 1"),
        ({"scale_factor": "2"}, TypeError, r"'scale_factor' must be a finite number above 1, but got '2' of type str"),
        ({"hysteresis": 0}, ValueError, r"'hysteresis' must be at least 1, but got 0"),
        ({"hysteresis": 2.0}, TypeError, r"'hysteresis' must be an integer .* but got 2.0 of type float"),
    ],
)
def test_bad_input_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        AdaptiveLossScaleUpdateCell(**{"loss_scale_value": 1024, "scale_factor": 2, "scale_window": 20, **arguments})


@pytest.mark.parametrize("stock", [nn.TrainOneStepWithLossScaleCell, mindformers.wrapper.MFTrainOneStepCell])
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_works_in_the_stock_train_step_cells(mode, stock, hysteresis):
    """Told to take its IsFinite branch, a stock cell runs on CPU; that branch is the one of Ascend 910B."""
    net = nn.Dense(3, 2)
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20, hysteresis=hysteresis)
    step = stock(nn.WithLossCell(net, nn.MSELoss()), optimizer, scale_sense=update_cell)
    step.ascend_910b_target, step.enable_allfinite = True, False
    features, target = np.ones((4, 3), np.float32), Tensor(np.zeros((4, 2), np.float32))
    overflows = [bool(step(Tensor(features * scale), target)[1]) for scale in (1, np.inf, np.inf, 1)]
    assert overflows == [False, True, True, False]
    assert float(step.scale_sense) == (256 if hysteresis == 1 else 512)
    assert update_cell.state()["skipped_steps"] == 2

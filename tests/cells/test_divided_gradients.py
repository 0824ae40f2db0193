"""A train step with a construct of its own says that it measures divided gradients, or a warning asks for it."""

import warnings

import pytest
from mindspore import dtype as mstype
from mindspore import nn, ops

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, GradientGuidedLossScaleUpdateCell
from mindformers_adaptive.wrapper import TrainOneStepWithLossScaleCell


class Measured(TrainOneStepWithLossScaleCell):
    """Measures the gradients before it divides them."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        status, scale = self.start_overflow_check(loss, self.scale_sense)
        sens = ops.ones_like(loss) * ops.cast(scale, loss.dtype)
        grads = self.grad_reducer(self.grad(self.network, self.weights)(*inputs, sens))
        overflow = self.process_loss_scale(self.get_overflow_status(status, grads))
        if not overflow:
            loss = ops.depend(loss, self.optimizer(self.hyper_map(ops.partial(divide, scale), grads)))
        return loss, overflow, scale


class Declared(Measured):
    """Says that its gradients are divided."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.declare_divided_gradients()


class OnlyLoss(TrainOneStepWithLossScaleCell):
    """Leaves the division to MindSpore's construct."""

    def construct(self, *inputs):
        return super().construct(*inputs)[0]


def divide(scale, gradient):
    return ops.cast(ops.cast(gradient, mstype.float32) / scale, gradient.dtype)


@pytest.mark.parametrize(
    ("kind", "update_cell", "asks"),
    [
        (Measured, GradientGuidedLossScaleUpdateCell, True),
        (Declared, GradientGuidedLossScaleUpdateCell, False),
        (OnlyLoss, GradientGuidedLossScaleUpdateCell, False),
        (TrainOneStepWithLossScaleCell, GradientGuidedLossScaleUpdateCell, False),
        (Measured, AdaptiveLossScaleUpdateCell, False),
    ],
)
def test_a_cell_that_does_not_say_that_it_divides_is_asked_once(graph_mode, kind, update_cell, asks):
    network = nn.WithLossCell(nn.Dense(3, 2, "ones"), nn.MSELoss())
    arguments = {} if update_cell is GradientGuidedLossScaleUpdateCell else {"scale_factor": 2, "scale_window": 20}
    step = kind(network, nn.SGD(network.trainable_params(), 0.01), update_cell(2.0**8, **arguments))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step.set_train()
    messages = [str(each.message) for each in caught if "declare_divided_gradients" in str(each.message)]
    assert len(messages) == asks
    if asks:
        assert "'construct' of Measured" in messages[0]

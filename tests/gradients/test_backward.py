"""The gradient sweep measures the backward pass of a training: sweep and training give the same gradient norm."""

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.ranges import GradientSweep, find_loss_scale, gradient_ranges
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell, TrainOneStepWithLossScaleCell
from tests.shared.networks import TOKENS, PerToken, resettable
from tests.shared.versions import NEEDS_LOSS_PER_TOKEN

LOSS_SCALE = 2.0**6


def batch(seed=0):
    return Tensor(np.random.default_rng(seed).normal(size=(TOKENS, 8)), mstype.float32)


def train_step_of(network, **arguments):
    update_cell = AdaptiveLossScaleUpdateCell(LOSS_SCALE, 2, 20)
    optimizer = nn.SGD(network.trainable_params(), 0.01)
    return MFTrainOneStepCell(network, optimizer, use_clip_grad=True, scale_sense=update_cell, **arguments).set_train()


def assert_norm_is_that_of_the_step(train_step, rel=1e-5):
    sweep = GradientSweep(train_step)
    for seed in range(2):
        inputs = batch(seed)
        ranges = sweep(inputs, [1, LOSS_SCALE])
        loss, overflow, _, _, global_norm = train_step(inputs)
        assert not overflow
        for scale in ranges.loss_scales:
            assert ranges.overall(scale, unscaled=True).norm == pytest.approx(float(global_norm), rel=rel)
        assert ranges.batches[0][0].loss == pytest.approx(float(loss), rel=rel)
    return ranges


@NEEDS_LOSS_PER_TOKEN
def test_norm_is_that_of_the_step_with_a_loss_per_token(mode):
    ranges = assert_norm_is_that_of_the_step(train_step_of(PerToken(), calculate_per_token_loss=True))
    # Gradients must fit into FP16 before the division by the number of tokens.
    assert ranges.batches[0][0].grad_scale_factor == TOKENS
    as_computed, unscaled = ranges.overall(LOSS_SCALE), ranges.overall(LOSS_SCALE, unscaled=True)
    assert as_computed.largest == pytest.approx(unscaled.largest * LOSS_SCALE * TOKENS)
    assert ranges.to_dict()["batches"][0]["grad_scale_factor"] == TOKENS
    norm_in_the_table = ranges.table(LOSS_SCALE).splitlines()[-1].split()[3]
    assert float(norm_in_the_table) == pytest.approx(unscaled.norm, rel=1e-2)


def test_norm_of_one_loss_is_the_steps_and_all_ways_agree(mode):
    network = nn.WithLossCell(nn.Dense(8, 2).to_float(mstype.float16), nn.MSELoss())
    inputs = batch(), Tensor(np.ones((TOKENS, 2)), mstype.float32)
    step = train_step_of(network)
    norm = gradient_ranges(step, inputs, [LOSS_SCALE]).overall(LOSS_SCALE, unscaled=True).norm
    *_, global_norm = step(*inputs)
    assert norm == pytest.approx(float(global_norm), rel=1e-5)
    optimizer = nn.Adam(network.trainable_params())
    step = TrainOneStepWithLossScaleCell(network, optimizer, Tensor(4.0, mstype.float32))
    scales = [1, 2**10, 2**30]
    assert gradient_ranges(step, inputs, scales).to_dict() == gradient_ranges(network, inputs, scales).to_dict()


@NEEDS_LOSS_PER_TOKEN
def test_scale_found_for_a_loss_per_token_holds_in_training(graph_mode):
    step = train_step_of(PerToken(), calculate_per_token_loss=True)
    reset = resettable(step)
    ceiling = find_loss_scale(step, batch(), margin=0).ceiling
    assert ceiling < 2.0**32
    for scale, overflows in ((ceiling, False), (ceiling * 2, True)):
        ops.assign(reset().scale_sense, Tensor(scale, mstype.float32))
        assert bool(step(batch())[1]) == overflows

"""Take steps with the pipeline train-step cell on a CPU; ``test_pipeline_cell.py`` starts this script with a folder.

The pipeline cell requires semi-automatic parallelism, whose compiler rejects a CPU. So the script leaves this mode
before the cell compiles. For an optimizer that is not sharded, that compiler would also sum the gradients of the
micro-batches in ``accu_grads``; here ``plain()`` sets these sums by hand. The script writes its results to
FOLDER/seen.json.
"""

import json
import sys
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.communication import init

from mindformers_adaptive.mindformers.trainer import MeanOverMicroBatches
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFPipelineWithLossScaleCell, MFTrainOneStepCell
from tests.shared.networks import HalfPrecisionSum

SIZE, BATCH, MICRO_BATCHES, SCALE = 4, 8, 2, 2.0**12
MAX_NORM = 0.25
# For each step, the index of the sample (or of the gradient element) that overflows, or None. LARGE times the loss
# scale, 2^6 * 2^12, is too large for FP16.
OVERFLOWS = [None, 0, None, None, -1, None]
LARGE = 2.0**6


def main(folder):
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    init()
    step = build_pipeline(shard=True)
    seen = {"sharded": sharded(step), "plain": plain(), "FP16 weights": with_fp16_weights()}
    seen["went back"] = going_back(step)
    (Path(folder) / "seen.json").write_text(json.dumps(seen))


def build(cell, network, **arguments):
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
    update_cell = AdaptiveLossScaleUpdateCell(SCALE, 2, 2, max_scale_window=2, min_scale_window=2)
    clipping = {"use_clip_grad": True, "max_grad_norm": MAX_NORM, **arguments}
    return cell(network, optimizer, scale_sense=update_cell, **clipping)


def build_pipeline(shard):
    mindspore.set_auto_parallel_context(parallel_mode="semi_auto_parallel", enable_parallel_optimizer=shard)
    network = nn.PipelineCell(HalfPrecisionSum(SIZE, factor=1 / BATCH), MICRO_BATCHES)
    step = build(MFPipelineWithLossScaleCell, network, micro_batch_num=MICRO_BATCHES)
    mindspore.reset_auto_parallel_context()
    assert step.opt_shard is shard
    return step.set_train()


def sharded(step):
    """Return, for each step, the results of the pipeline cell and the weight of a reference cell after the same step.

    The reference cell is an MFTrainOneStepCell that takes the mean of the losses of the micro-batches.
    """
    network = HalfPrecisionSum(SIZE, factor=1 / BATCH)
    control = build(MFTrainOneStepCell, MeanOverMicroBatches(network, MICRO_BATCHES)).set_train()
    record = []
    for index in OVERFLOWS:
        features = np.random.default_rng(0).uniform(0.5, 1.0, (BATCH, SIZE)).astype(np.float32)
        if index is not None:
            # Put an overflow into one sample, either of the first or of the last micro-batch.
            features[index] = LARGE * 8
        record.append(take(step, features))
        control(Tensor(features))
        record[-1]["control"] = control.weights[0].asnumpy().tolist()
    return record


def plain():
    step = build_pipeline(shard=False)
    record = []
    for index in OVERFLOWS:
        gradient = np.linspace(1.0, 2.0, SIZE, dtype=np.float32) * float(step.scale_sense.asnumpy())
        if index is not None:
            gradient[index] = np.inf
        step.accu_grads[0].set_data(Tensor(gradient))
        record.append(take(step, np.ones((BATCH, SIZE), np.float32)))
    return record


def going_back(step):
    """Return the values of all Parameters after five steps, and after going back to step 3 and taking two again."""
    features, states = np.ones((BATCH, SIZE), np.float32), []
    for _ in range(5):
        take(step, features)
        states.append({parameter.name: parameter.asnumpy().tolist() for parameter in step.get_parameters()})
    saved = {name: Parameter(Tensor(np.array(value)), name=name) for name, value in states[2].items()}
    mindspore.load_param_into_net(step, saved)
    for _ in range(2):
        take(step, features)
    return states[-1], {parameter.name: parameter.asnumpy().tolist() for parameter in step.get_parameters()}


def with_fp16_weights():
    """Take a step at a loss scale whose reciprocal is 0 in FP16; return the new weight, and NumPy's result for it."""
    mindspore.set_auto_parallel_context(parallel_mode="semi_auto_parallel", enable_parallel_optimizer=True)
    # With this small factor, the scaled gradients do not overflow FP16.
    network = HalfPrecisionSum(SIZE, factor=2.0**-20)
    network.weight.set_dtype(mindspore.float16)
    optimizer = nn.SGD(network.trainable_params(), learning_rate=2.0**18)
    scale = Tensor(2.0**28, mindspore.float32)
    step = MFPipelineWithLossScaleCell(
        nn.PipelineCell(network, MICRO_BATCHES), optimizer, scale_sense=scale, use_clip_grad=False
    )
    mindspore.reset_auto_parallel_context()
    features = np.random.default_rng(0).uniform(0.5, 1.0, (BATCH, SIZE)).astype(np.float16)
    step.set_train()(Tensor(features))
    expected = 1 - 2.0**-2 * features.sum(0, dtype=np.float64)
    return {"weight": step.weights[0].asnumpy().tolist(), "expected": expected.tolist()}


def take(step, features):
    before, moments_before = step.weights[0].asnumpy().copy(), step.optimizer.moments[0].asnumpy().copy()
    loss, overflow, loss_scale, _, norm = step(Tensor(features))
    after, moments = step.weights[0].asnumpy(), step.optimizer.moments[0].asnumpy()
    return {
        "finite_loss": bool(np.isfinite(loss.asnumpy()).all()),
        "overflow": bool(overflow),
        "loss_scale": float(loss_scale),
        "norm": float(norm.asnumpy().item()),
        "unchanged": np.array_equal(before, after) and np.array_equal(moments_before, moments),
        "accumulated": float(np.abs(step.accu_grads[0].asnumpy()).max()),
        "weight": after.tolist(),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])

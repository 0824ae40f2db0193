"""Train in two processes on a CPU; ``test_two_processes.py`` starts this script with a folder as the argument.

Only the second process gets an inf, at step 3; in fixed-scale training, no process gets an inf. Each process writes its
results of data-parallel, pipeline and fixed-scale training to FOLDER/rank_N.json, and its monitors write there too.
"""

import json
import sys
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_rank, init
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model

from mindformers_adaptive import FixedScaleTrainOneStepCell, GradientRangeMonitor, LossScaleMonitor
from mindformers_adaptive.wrapper import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
    MFPipelineWithLossScaleCell,
    TrainOneStepWithLossScaleCell,
)
from tests.shared.exported_graph import export_graph
from tests.shared.versions import BEFORE_1_7


def main(folder):
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    init()
    seen = {"data_parallel": overflow_of_one(data_parallel_step), "pipeline": overflow_of_one(pipeline_step)}
    seen["fixed_scale"] = fixed_scale()
    monitor_training(Path(folder))
    (Path(folder) / f"rank_{get_rank()}.json").write_text(json.dumps(seen))


def overflow_of_one(make_step):
    adaptive = AdaptiveLossScaleUpdateCell(4096, 2, 2, max_scale_window=2, min_scale_window=2)
    guided = GradientGuidedLossScaleUpdateCell(4096)
    return {**five_steps(make_step(adaptive)), "guided": five_steps(make_step(guided))}


def five_steps(step):
    step.set_train()
    update_cell = step.loss_scaling_manager
    record = []
    for number in range(1, 6):
        features = np.full((2, 4), 1.0 + get_rank(), np.float32)
        if number == 3 and get_rank() == 1:
            features[0, 0] = np.inf
        before = weight_of(step)
        overflow = step(Tensor(features), Tensor(np.zeros((2, 3), np.float32)))[1]
        changed = not np.array_equal(before, weight_of(step))
        record.append({"overflow": bool(overflow), "loss_scale": float(step.scale_sense), "changed": changed})
        if isinstance(update_cell, GradientGuidedLossScaleUpdateCell):
            record[-1]["largest"] = update_cell.state()["largest_gradient"]
    seen = {"steps": record, "state": update_cell.state(), "weight": weight_of(step).tolist()}
    # MindSpore cannot export a graph with a Parameter that belongs to no cell, such as largest_per_parameter.
    if isinstance(update_cell, AdaptiveLossScaleUpdateCell):
        if get_rank() == 0:
            graph = export_graph(step, Tensor(features), Tensor(np.zeros((2, 3), np.float32)))
            seen["collectives"] = graph.collectives
        seen["shards"] = shards(step)
    return seen


def monitor_training(folder):
    """Train three data-parallel steps with monitors that record in each process."""
    features, targets = np.full((6, 4), 1.0 + get_rank(), np.float32), np.zeros((6, 3), np.float32)
    if get_rank() == 1:
        features[4:] = np.inf
    data = NumpySlicesDataset((features, targets), shuffle=False).batch(2)
    options = {"every_n_steps": 1, "all_ranks": True}
    monitors = [GradientRangeMonitor(record_path=folder / "ranges.jsonl", **options)]
    monitors.append(LossScaleMonitor(record_path=folder / "record.jsonl", **options))
    step = data_parallel_step(AdaptiveLossScaleUpdateCell(4096, 2, 20))
    Model(step).train(1, data, callbacks=monitors, dataset_sink_mode=False)


def fixed_scale():
    """Return the weights after three steps with a fixed loss scale, and with MindSpore's cell without loss scaling."""
    mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    steps = [FixedScaleTrainOneStepCell(*network_and_optimizer(), loss_scale=1024)]
    steps.append(nn.TrainOneStepCell(*network_and_optimizer()))
    features, target = np.full((2, 4), 1.0 + get_rank(), np.float32), np.zeros((2, 3), np.float32)
    for _ in range(3):
        for step in steps:
            step.set_train()(Tensor(features), Tensor(target))
    scaled, plain = (weight_of(step).tolist() for step in steps)
    return {"weight": scaled, "plain": plain}


def shards(step):
    """Ask MindFormers how weights are sharded, as it does to save by `checkpoint:`; return the answer or the error."""
    if BEFORE_1_7:
        return None
    from mindformers.checkpoint.sharded_tensor import get_all_sharded_tensor
    from mindformers.core.context import set_context

    # MindFormers 2 reads the execution mode from its own context, not from MindSpore's context.
    set_context(mode=0)
    try:
        return str(get_all_sharded_tensor(step))
    except RuntimeError as error:
        return f"RuntimeError: {error}"


def data_parallel_step(update_cell):
    """Return a train step whose gradients are averaged over the processes."""
    mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    return TrainOneStepWithLossScaleCell(*network_and_optimizer(), scale_sense=update_cell)


def pipeline_step(update_cell):
    """Return a train step whose gradients stay local; overflows of other processes are seen by overflow detection only.

    The pipeline cell requires semi-automatic parallelism, whose compiler rejects a CPU, so this mode is left before the
    cell compiles.
    """
    mindspore.set_auto_parallel_context(parallel_mode="semi_auto_parallel", enable_parallel_optimizer=True)
    step = MFPipelineWithLossScaleCell(*network_and_optimizer(), scale_sense=update_cell)
    mindspore.reset_auto_parallel_context()
    return step


def network_and_optimizer():
    network = nn.Dense(4, 3, weight_init="ones", bias_init="zeros")
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.01, momentum=0.9)
    return nn.WithLossCell(network, nn.MSELoss()), optimizer


def weight_of(step):
    return step.weights[0].asnumpy().copy()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Functions that compile one case each, in the environment of a dry run."""

import mindformers.wrapper
import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.nn.wrap.cell_wrapper import _VirtualDatasetCell

import mindformers_adaptive
import mindformers_adaptive.wrapper

START = 2.0**16


def control(operator):
    """One operator, of those that an Ascend has not but for Add."""
    halves = Tensor(np.ones((2, 3)), mindspore.float16)
    singles = halves.astype(mindspore.float32)
    primitive, inputs = {
        "Add": (ops.Add(), (halves, halves)),
        "FloatStatus": (ops.operations.FloatStatus(), (singles,)),
        "AvgPool_int32": (ops.AvgPool(2, 2), (Tensor(np.ones((1, 1, 4, 4)), mindspore.int32),)),
        "Fmax": (ops.Fmax(), (singles, singles)),
    }[operator]
    Call(primitive).compile(*inputs)


class Call(nn.Cell):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, *inputs):
        return self.function(*inputs)


# Update cells


def update_cell(way, **options):
    """An update cell by its way of scaling."""
    if way in ("stock", "dynamic"):
        return nn.DynamicLossScaleUpdateCell(START, 2, 20)
    if way == "mindformers":
        return mindformers.wrapper.AdaptiveLossScaleUpdateCell(START, 2, 20)
    if way == "adaptive":
        return mindformers_adaptive.AdaptiveLossScaleUpdateCell(START, 2, 20, **options)
    if way == "log_max":
        return mindformers_adaptive.RuleLossScaleUpdateCell(START, "log_max.LogMaxRule", **options)
    options = {"track_per_parameter": True, **options} if way == "guided_each" else options
    return mindformers_adaptive.GradientGuidedLossScaleUpdateCell(START, **options)


class Owner(nn.Cell):
    """The loss scale and an update cell, as in a train-step cell."""

    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.scale_sense = Parameter(Tensor(START, mindspore.float32), name="scale_sense")

    def construct(self, overflow):
        return self.cell(self.scale_sense, overflow)


def update_cell_alone(way, **options):
    Owner(update_cell(way, **options)).compile(Tensor(True))


# Train steps without a model


class Layers(nn.Cell):
    """Two dense layers in FP16 and their mean loss in FP32."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(16, 16, activation="relu").to_float(mindspore.float16)
        self.second = nn.Dense(16, 16).to_float(mindspore.float16)

    def construct(self, features, target):
        return ops.mean(ops.square(ops.cast(self.second(self.first(features)), mindspore.float32) - target))


def rows():
    return Tensor(np.ones((8, 16)), mindspore.float32), Tensor(np.zeros((8, 16)), mindspore.float32)


def momentum(network):
    # As MindFormers has it. Its own cell does not take a constant rate, which becomes a second Parameter of one name.
    rate = nn.PolynomialDecayLR(0.1, 0.01, decay_steps=100, power=1.0)
    return nn.Momentum(network.trainable_params(), rate, momentum=0.9)


def plain_step(way, network="Layers"):
    """``TrainOneStepWithLossScaleCell``."""
    wrapper = nn if way == "stock" else mindformers_adaptive.wrapper
    network = globals()[network]()
    step = wrapper.TrainOneStepWithLossScaleCell(network, momentum(network), update_cell(way))
    step.set_train().compile(*rows())


def mf_step(way, network=Layers, inputs=rows, **options):
    """``MFTrainOneStepCell`` with clipping."""
    wrapper = mindformers.wrapper if way == "stock" else mindformers_adaptive.wrapper
    network = network()
    options = {"use_clip_grad": True, **options}
    step = wrapper.MFTrainOneStepCell(network, momentum(network), scale_sense=update_cell(way), **options)
    step.set_train().compile(*inputs())


# Train steps in several processes


class Split(Layers):
    """The layers in two pipeline stages; each process has some rows of each weight."""

    def __init__(self):
        super().__init__()
        stages = mindspore.get_auto_parallel_context("pipeline_stages")
        split = mindspore.communication.get_group_size() // stages
        for dense, stage in ((self.first, 0), (self.second, stages - 1)):
            dense.matmul.shard(((1, 1), (split, 1)))
            dense.bias_add.shard(((1, split), (split,)))
            if stages > 1:
                dense.pipeline_stage = stage


def pipeline_step(way, micro_batches=4):
    """``MFPipelineWithLossScaleCell`` with clipping."""
    wrapper = mindformers.wrapper if way == "stock" else mindformers_adaptive.wrapper
    network = _VirtualDatasetCell(nn.PipelineCell(Split(), micro_batches)).set_train()
    step = wrapper.MFPipelineWithLossScaleCell(
        network, momentum(network), scale_sense=update_cell(way), micro_batch_num=micro_batches
    )
    step.set_train().compile(*rows())

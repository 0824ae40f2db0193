"""Functions that each compile one case, in the environment of a dry run for Ascend."""

from pathlib import Path

import mindformers.wrapper
import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.mindrecord import FileWriter
from mindspore.nn.wrap.cell_wrapper import _VirtualDatasetCell

import mindformers_adaptive
import mindformers_adaptive.wrapper
from mindformers_adaptive.gradients.backward import backward_pass
from mindformers_adaptive.gradients.layers import named_cells
from mindformers_adaptive.mindformers.launcher import launch, load_config
from mindformers_adaptive.mindformers.trainer import MeanOverMicroBatches
from mindformers_adaptive.mindformers.training_probe import TrainingSource
from mindformers_adaptive.overflow.graph_watch import GraphWatch
from scripts.ascend import optimizers
from scripts.ascend.printed_parameters import LEARNING_RATES, forget_printed

ROOT = Path(__file__).resolve().parents[2]

START = 2.0**16
# The number of samples in the training data, enough for one batch in every process.
ROWS = 128


def control(operator):
    """Compile one operator, to test the dry run itself. Of the four operators, an Ascend has a kernel only for Add."""
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


# Compile update cells


def update_cell(way, **options):
    """Return the update cell for a way of scaling the loss."""
    if way in ("stock", "dynamic"):
        return nn.DynamicLossScaleUpdateCell(START, 2, 20)
    if way == "mindformers":
        return mindformers.wrapper.AdaptiveLossScaleUpdateCell(START, 2, 20)
    if way == "adaptive":
        return mindformers_adaptive.AdaptiveLossScaleUpdateCell(START, 2, 20, **options)
    if way == "log_max":
        return mindformers_adaptive.RuleLossScaleUpdateCell("log_max.LogMaxRule", START, **options)
    return mindformers_adaptive.GradientGuidedLossScaleUpdateCell(START, **options)


class Owner(nn.Cell):
    """A cell that owns a loss scale and an update cell, as a train-step cell does."""

    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.scale_sense = Parameter(Tensor(START, mindspore.float32), name="scale_sense")

    def construct(self, overflow):
        return self.cell(self.scale_sense, overflow)


def update_cell_alone(way, **options):
    Owner(update_cell(way, **options)).compile(Tensor(True))


# Compile train steps of small networks


class Layers(nn.Cell):
    """A network of dense layers in FP16 with a mean squared loss in FP32."""

    def __init__(self, count=2):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(16, 16).to_float(mindspore.float16) for _ in range(count)])

    def construct(self, features, target):
        for layer in self.layers:
            features = layer(features)
        return ops.mean(ops.square(ops.cast(features, mindspore.float32) - target))


def rows():
    return Tensor(np.ones((8, 16)), mindspore.float32), Tensor(np.zeros((8, 16)), mindspore.float32)


def momentum(network):
    # Use a learning-rate schedule, as MindFormers does. MindFormers' train-step cell rejects a constant learning rate,
    # because the rate's Parameter has a name that is already in use.
    rate = nn.PolynomialDecayLR(0.1, 0.01, decay_steps=100, power=1.0)
    return nn.Momentum(network.trainable_params(), rate, momentum=0.9)


def wrapper_of(way):
    """Return the module from which train-step cells are taken: MindFormers' module or this package's."""
    return mindformers.wrapper if way == "stock" else mindformers_adaptive.wrapper


def compile_step(step, inputs=None):
    step.set_train().compile(*(inputs or rows()))


def plain_step(way, network="Layers"):
    """Compile ``TrainOneStepWithLossScaleCell``."""
    wrapper = nn if way == "stock" else mindformers_adaptive.wrapper
    network = NETWORKS[network]()
    compile_step(wrapper.TrainOneStepWithLossScaleCell(network, momentum(network), update_cell(way)))


def mf_step(way, network="Layers", optimizer="momentum", **options):
    """Compile ``MFTrainOneStepCell`` with gradient clipping."""
    network, options = NETWORKS[network](), {"use_clip_grad": True, "scale_sense": update_cell(way), **options}
    if optimizer == "grouped":
        forget_printed(LEARNING_RATES)
        options["lr_scheduler"] = optimizers.schedule()
        options["grouped_lr_scheduler"] = [{"lr_scheduler": optimizers.schedule(0.1)}]
    optimizer = momentum(network) if optimizer == "momentum" else getattr(optimizers, optimizer)(network)
    compile_step(wrapper_of(way).MFTrainOneStepCell(network, optimizer, **options))


class SumAndNumber(Layers):
    """The network ``Layers``, which here returns the sum of the losses and the number of losses."""

    def __init__(self):
        super().__init__()
        self.number = Tensor([8 * 16], mindspore.float32)

    def construct(self, features, target):
        return ops.reshape(super().construct(features, target) * 128, (1,)), self.number


class InlinedLate(Layers):
    @mindspore.lazy_inline
    def __init__(self):
        super().__init__()


class LowRank(Layers):
    """Frozen dense layers with a trainable update of rank 2, as in LoRA."""

    def __init__(self):
        super().__init__()
        for weight in self.trainable_params():
            weight.requires_grad = False
        self.down = nn.Dense(16, 2, has_bias=False).to_float(mindspore.float16)
        self.up = nn.Dense(2, 16, has_bias=False).to_float(mindspore.float16)

    def construct(self, features, target):
        return super().construct(features, target - ops.cast(self.up(self.down(features)), mindspore.float32))


def in_fp16():
    """Return the network ``Layers``, with weights in FP16 like the computation."""
    network = Layers()
    for weight in network.trainable_params():
        weight.set_dtype(mindspore.float16)
    return network


def recomputed():
    network = Layers()
    network.layers[0].recompute()
    return network


def fixed_scale_step(way):
    """Compile ``FixedScaleTrainOneStepCell``, or MindSpore's train-step cell without loss scaling."""
    network = Layers()
    fixed = mindformers_adaptive.FixedScaleTrainOneStepCell
    compile_step((nn.TrainOneStepCell if way == "stock" else fixed)(network, momentum(network)))


def manager(way):
    """Return the loss-scale manager for a way of scaling the loss."""
    if way == "stock":
        return mindspore.amp.DynamicLossScaleManager(START)
    if way == "adaptive":
        return mindformers_adaptive.AdaptiveLossScaleManager(START)
    return mindformers_adaptive.GradientGuidedLossScaleManager(START)


def built_step(way):
    """Compile the train-step cell that ``build_train_network`` returns for a loss-scale manager."""
    package = mindspore.amp if way == "stock" else mindformers_adaptive
    network = Layers()
    compile_step(package.build_train_network(network, momentum(network), level="O0", loss_scale_manager=manager(way)))


def model_step(way):
    """Compile the train-step cell that ``Model`` creates for a loss-scale manager."""
    network = Layers()
    if way != "stock":
        mindformers_adaptive.enable_loss_scale_in_model()
    model = mindspore.train.Model(network, optimizer=momentum(network), loss_scale_manager=manager(way))
    compile_step(model.train_network)


def scaler_step(way):
    """Compile a function that trains by ``value_and_grad`` with a loss scaler."""
    network = Layers()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    scaler = {
        "stock": lambda: mindspore.amp.DynamicLossScaler(START, 2, 20),
        "adaptive": lambda: mindformers_adaptive.AdaptiveLossScaler(START),
        "guided": lambda: mindformers_adaptive.GradientGuidedLossScaler(START),
    }[way]()

    def scaled_loss(*inputs):
        return scaler.scale(network(*inputs))

    value_and_grad = mindspore.value_and_grad(scaled_loss, None, optimizer.parameters)

    @mindspore.jit
    def step(*inputs):
        loss, gradients = value_and_grad(*inputs)
        gradients = scaler.unscale(gradients)
        are_finite = mindspore.amp.all_finite(gradients)
        if are_finite:
            optimizer(gradients)
        if way == "guided":
            scaler.adjust(are_finite, gradients)
        else:
            scaler.adjust(are_finite)
        return loss

    step(*rows())


def watched_step(way):
    """Compile the backward pass of a train step that also measures the values of each layer, as in ``why --graph``."""
    network = Layers()
    compile_watched(nn.TrainOneStepWithLossScaleCell(network, momentum(network), update_cell(way)), rows())


def compile_watched(step, inputs):
    backward = backward_pass(step.set_train())
    with GraphWatch(step.network, named_cells(step.network)).watching(backward, step):
        backward.compile(Tensor(START, mindspore.float32), *inputs)


# Compile train steps for several processes


def split(network):
    """Put each layer into a pipeline stage, if there are stages, and divide the rows of each weight among processes."""
    stages = mindspore.get_auto_parallel_context("pipeline_stages")
    parts = mindspore.communication.get_group_size() // stages
    for stage, dense in enumerate(network.layers):
        dense.matmul.shard(((1, 1), (parts, 1)))
        dense.bias_add.shard(((1, parts), (parts,)))
        if stages > 1:
            dense.pipeline_stage = stage
    return network


def pipeline_step(way, micro_batches=4, **options):
    """Compile ``MFPipelineWithLossScaleCell`` with gradient clipping."""
    layers = Layers(mindspore.get_auto_parallel_context("pipeline_stages"))
    network = _VirtualDatasetCell(nn.PipelineCell(split(layers), micro_batches)).set_train()
    options = {"scale_sense": update_cell(way), "micro_batch_num": micro_batches, **options}
    compile_step(wrapper_of(way).MFPipelineWithLossScaleCell(network, momentum(network), **options))


NETWORKS = {
    "Layers": Layers,
    "accumulating": lambda: MeanOverMicroBatches(Layers(), 2),
    "in FP16": in_fp16,
    "InlinedLate": InlinedLate,
    "LowRank": LowRank,
    "recomputed": recomputed,
    "SumAndNumber": SumAndNumber,
    "split": lambda: split(Layers()),
    "split, SumAndNumber": lambda: split(SumAndNumber()),
}


# Compile the train steps of whole models


def launched(way, config, as_it_is=False, watched=False, **options):
    """Run the package's launcher with a YAML file, a small model and data of zeros, for one epoch in sink mode.

    With ``as_it_is``, the YAML file already has adaptive scaling. With ``watched``, compile only the backward pass that
    also measures the values of each layer.
    """
    update_cells = {
        "stock": "DynamicLossScaleUpdateCell",
        "adaptive": "AdaptiveLossScaleUpdateCell",
        "guided": "GradientGuidedLossScale",
    }
    if not as_it_is or way != "adaptive":
        windows = {} if way == "guided" else {"scale_factor": 2, "scale_window": 20}
        scale_sense = {"type": update_cells[way], "loss_scale_value": 65536, **windows}
        options = {**options, "runner_wrapper.scale_sense": scale_sense}
    folder = Path("rows").absolute()
    overrides = {
        "context.device_target": "Ascend",
        "runner_config.epochs": 1,
        "runner_config.sink_mode": True,
        "runner_config.sink_size": -1,
        "train_dataset.data_loader.dataset_dir": str(folder),
        "train_dataset.data_loader.num_samples": ROWS,
        # Use one data-loading worker, because MindSpore rejects more workers on a machine with few cores.
        "train_dataset.num_parallel_workers": 1,
        **options,
    }
    file = ROOT / "configs" / config
    config = load_config(file, overrides, may_add=list(overrides))
    write_rows(folder, config.train_dataset.input_columns, config.model.model_config.seq_length + 1)
    if watched:
        step, dataset, *_ = TrainingSource(file, None, folder, overrides).build()
        compile_watched(step, next(dataset.create_tuple_iterator()))
    else:
        launch(config)


def write_rows(folder, columns, length):
    folder.mkdir()
    writer = FileWriter(str(folder / "rows.mindrecord"), shard_num=1)
    writer.add_schema({column: {"type": "int32", "shape": [length]} for column in columns}, "zeros")
    writer.write_raw_data([dict.fromkeys(columns, np.zeros(length, np.int32))] * ROWS)
    writer.commit()


def mcore_step(way, model, watched=False):
    """Compile a step of a tiny mcore model of MindFormers, with flash attention, fused norms or experts."""
    from mindformers.core.context.build_context import MFContextOperator
    from mindformers.tools.register import MindFormerConfig

    from scripts.ascend import mcore as tiny

    MFContextOperator(MindFormerConfig(run_mode="train", model={"model_config": {}})).set_context(use_legacy=False)
    network = tiny.build_qwen3() if model == "qwen3" else tiny.build_deepseek()
    optimizer = nn.Adam(network.trainable_params(), nn.CosineDecayLR(0.001, 0.02, 40))
    step = wrapper_of(way).MFTrainOneStepCell(network, optimizer, use_clip_grad=True, scale_sense=update_cell(way))
    tokens = Tensor(np.ones((tiny.BATCH, tiny.SEQ_LENGTH)), mindspore.int32)
    (compile_watched if watched else compile_step)(step, (tokens, tokens, ops.cast(tokens, mindspore.float32)))

"""Gradient accumulation on a CPU, which MindFormers leaves out there."""

from mindformers.wrapper.wrapper import GradAccumulationCellWithTwoOutput
from mindspore import nn

from mindformers_adaptive.integration.checks import given_to_train_step

__all__ = ["MeanOverMicroBatches", "accumulate", "take_accumulation_steps"]


class MeanOverMicroBatches(nn.Cell):
    """The mean loss over the micro batches that a batch is split into, whose gradients are accumulated.

    Args:
        network (Cell): returns the loss of a micro batch, a Tensor.
        micro_batches (int): how many, at least 1.

    Inputs:
        - **inputs** (tuple[Tensor]) - of the network, with the batch as their first axis, a multiple of
          ``micro_batches``.

    Outputs:
        Tensor, of the shape and dtype of the network's loss.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor
        >>> network = MeanOverMicroBatches(nn.WithLossCell(nn.Identity(), nn.MSELoss()), 2)
        >>> float(network(Tensor(np.array([[1.0], [3.0]], np.float32)), Tensor(np.zeros((2, 1), np.float32))))
        5.0
    """

    def __init__(self, network, micro_batches):
        super().__init__(auto_prefix=False)
        # MindSpore's own cell returns the sum, and leaves the division to a train-step cell for Ascend.
        self.network = nn.GradAccumulationCell(network, micro_batches)
        self.micro_batches = micro_batches

    def construct(self, *inputs):
        return self.network(*inputs) / self.micro_batches


def take_accumulation_steps(config):
    """Take ``runner_config.gradient_accumulation_steps`` out of a configuration, and return it.

    The batches become larger by it, as MindFormers makes them in semi-automatic parallel mode; elsewhere it would set
    the number to 1.

    Args:
        config (MindFormerConfig): of a training; changed in place.

    Returns:
        int, to be given to :func:`accumulate`; 1 for no accumulation.
    """
    runner_config = config.runner_config
    steps = (runner_config.gradient_accumulation_steps if runner_config else None) or 1
    if steps > 1:
        runner_config.gradient_accumulation_steps = 1
        runner_config.batch_size *= steps
    return steps


def accumulate(trainer, steps):
    """Make a trainer cut each batch of its training into micro batches, and add up their gradients.

    Args:
        trainer (BaseTrainer): MindFormers' trainer of a task; changed in place, before its ``set_config()``.
        steps (int): the number of micro batches, by which the batch size in its configuration was multiplied.
    """
    wrap_network = trainer.wrap_network_with_tool_cells
    check_batch_size = trainer._check_global_batch_size_for_auto_parallel
    reset_batch_size = trainer._reset_dataset_batch_size

    def wrap(network):
        # With a loss per token the sums of losses and tokens are what is needed, and the losses are no means.
        per_token = given_to_train_step(trainer.config, "calculate_per_token_loss")
        cell = GradAccumulationCellWithTwoOutput if per_token else MeanOverMicroBatches
        return cell(wrap_network(network), steps)

    def check():
        check_batch_size()
        # What the model sees.
        trainer.config.runner_config.mini_batch_size //= steps

    def reset():
        reset_batch_size()
        # Evaluation accumulates nothing.
        if trainer.config.eval_dataset is not None:
            trainer.config.eval_dataset.batch_size //= steps

    trainer.wrap_network_with_tool_cells = wrap
    trainer._check_global_batch_size_for_auto_parallel = check
    trainer._reset_dataset_batch_size = reset

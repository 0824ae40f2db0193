"""The loss-scale finder: tries every power of two on a few batches."""

from mindformers_adaptive.gradients.ranges import gradient_ranges
from mindformers_adaptive.gradients.recommendation import DEFAULT_MARGIN, check_margin, recommend_loss_scale

__all__ = ["LOSS_SCALES", "find_loss_scale"]

# Every power of two from no scaling to 2^32, where the published FP16 trainings of large models start.
LOSS_SCALES = tuple(2.0**exponent for exponent in range(33))


def find_loss_scale(network, batches, margin=DEFAULT_MARGIN, *, progress=None):
    """Find the loss scale from which to start the training of a network.

    :func:`mindformers_adaptive.gradients.ranges.gradient_ranges` tries every power of two from 2^0 to 2^32.

    Args:
        network (Cell): returns the loss, as there.
        batches (Iterable): a few batches, as there.
        margin (int): how many powers of two to stay below the largest scale that does not overflow.
            Where the gradient of a Parameter is 0 at every scale, 2 more are left. Default: 2.
        progress (Callable, optional): called with the number of backward passes done, 33 a batch. Default: None.

    Returns:
        LossScaleRecommendation; ``print`` it for the text and the YAML.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if ``margin`` is below 0, or there is no batch.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindspore import dtype as mstype
        >>> net = nn.WithLossCell(nn.Dense(3, 1, "ones", has_bias=False).to_float(mstype.float16), nn.MSELoss())
        >>> batch = (Tensor(np.ones((4, 3), np.float32)), Tensor(np.ones((4, 1), np.float32)))
        >>> recommendation = find_loss_scale(net, [batch])
        >>> recommendation.ceiling, recommendation.loss_scale_value
        (8192.0, 2048.0)
    """
    check_margin(margin)
    return recommend_loss_scale(gradient_ranges(network, batches, LOSS_SCALES, progress=progress), margin)

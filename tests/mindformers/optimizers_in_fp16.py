"""A script that takes one step with each of four optimizers on FP16 weights, and prints a JSON list per optimizer.

The list has the name of the optimizer, the type of the second moments, whether the second moment of a gradient of 1e-4
is 0, and whether a weight whose gradient is 0 has become NaN.
"""

import functools
import json

import mindspore
import numpy as np
from mindformers.core.optim import AdamW
from mindspore import Parameter, Tensor, nn

OPTIMIZERS = {
    "AdamWeightDecay, eps 1e-8": functools.partial(nn.AdamWeightDecay, eps=1e-8),
    "AdamWeightDecay, eps 1e-6": functools.partial(nn.AdamWeightDecay, eps=1e-6),
    "Adam": functools.partial(nn.Adam, eps=1e-8),
    "MindFormers' AdamW": functools.partial(AdamW, eps=1e-8),
}


def main():
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    for name, make in OPTIMIZERS.items():
        weight = Parameter(Tensor(np.full(2, 0.5, np.float16)), name="weight")
        optimizer = make([weight], 1e-2)
        optimizer((Tensor(np.array([0.0, 1e-4], np.float16)),))
        [squares] = [each for each in optimizer.get_parameters() if each.name in ("adam_v.weight", "moment2.weight")]
        is_zero, has_nan = squares.asnumpy()[1] == 0, np.isnan(weight.asnumpy()[0])
        print(json.dumps([name, str(squares.dtype), bool(is_zero), bool(has_nan)]))


if __name__ == "__main__":
    main()

"""Traces of trainings in which activation gradients overflow before the gradients of the weights."""

import dataclasses

import numpy as np

from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules.formats import FLOAT16
from scripts.studies.synthetic import random_of

# Four sets of arguments (level, offset, spread, memory) for independent_ceiling(). The first set was measured in a LoRA
# fine-tuning (rank 4, all other weights frozen, batch size 64). The second set is the first with memory 0, so
# consecutive steps are independent. The third set was measured with batch size 1, the fourth with only the first of
# fourteen layers trained.
INDEPENDENT_CEILINGS = ((19.1, 1.4, 0.9, 0.95), (19.1, 1.4, 0.9, 0.0), (13.2, 5.4, 0.7, 0.3), (22.2, 14.4, 0.25, 0.5))

# Standard deviation of the ceilings, in bits. The value is small because the ceilings varied by less than 0.1 bits in
# real trainings in which activation gradients overflow first.
_SPREAD = 0.05


def independent_ceiling(steps, seed, level, offset, spread, memory):
    """Return a trace with a nearly constant ceiling, below the ceilings that the largest gradients imply.

    log2 of the ceiling is ``level``, with a little noise. The ceilings that the gradients imply are too high by
    ``offset`` bits in the mean, with the standard deviation ``spread``, and with the correlation ``memory`` (0 to 1)
    between consecutive steps.
    """
    ceiling = np.exp2(level + _SPREAD * random_of(seed, "ceiling").standard_normal(steps))
    wander = random_of(seed, "shown").standard_normal(steps)
    wander[1:] *= np.sqrt(1 - memory**2)
    for step in range(1, steps):
        wander[step] += memory * wander[step - 1]
    gradients = FLOAT16.largest / np.exp2(level + offset + spread * wander)
    return dataclasses.replace(Trace.exact("own ceiling", ceiling), largest_gradient=gradients)

r"""Synthetic traces, each of one behaviour and repeatable by its seed.

With :math:`t` from 0 to steps - 1, :math:`T` = max(steps - 1, 1) and independent standard normal numbers :math:`n_t`,
log2 of the ceiling of step t is:

.. code-block:: text

    stationary       level + n_t / 2
    slowly rising    level + 6 * (t / T - 1/2) + n_t / 2
    slowly falling   level - 6 * (t / T - 1/2) + n_t / 2
    sudden drop      level - 10 * [t >= steps // 2] + n_t / 2
    sudden rise      level + 10 * ([t >= steps // 2] - 1) + n_t / 2
    spikes           level - 6 * b_t + n_t / 2            b_t is 1 with probability 1 / 100, else 0
    heavy-tailed     level + s_t / 2                      s_t: Student's t, 2 degrees of freedom, infinite variance
    random walk      level + (n_0 + ... + n_t) / 10       1000 steps lead about 3 bits away

The level is 18 unless another one is given. Single low steps come once in 100, a tenth of the largest window of 1000.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.traces.gradients import checked_steps, random_of, with_gradients
from mindformers_adaptive.lab.traces.trace import Trace

__all__ = ["synthetic_trace", "synthetic_traces"]

# A small Llama trained in FP16 on CPU kept its dynamic loss scale between 2^16 and 2^20.
_LEVEL = 18.0

# The ceilings stay within the exponents of normal float32 numbers, as loss scales do.
_EXPONENTS = (-126.0, 127.0)

_Floats = NDArray[np.float64]


def _second_half(noise: _Floats) -> _Floats:
    return (np.arange(len(noise)) >= len(noise) // 2).astype(np.float64)


# log2 of the ceilings, from the level, n_t, t / T and the seed.
_FORMULAS: dict[str, Callable[[float, _Floats, _Floats, int], _Floats]] = {
    "stationary": lambda level, noise, *_: level + 0.5 * noise,
    "slowly rising": lambda level, noise, part, _: level + 6.0 * (part - 0.5) + 0.5 * noise,
    "slowly falling": lambda level, noise, part, _: level - 6.0 * (part - 0.5) + 0.5 * noise,
    "sudden drop": lambda level, noise, *_: level - 10.0 * _second_half(noise) + 0.5 * noise,
    "sudden rise": lambda level, noise, *_: level + 10.0 * (_second_half(noise) - 1) + 0.5 * noise,
    "spikes": lambda level, noise, _, seed: (
        level - 6.0 * (random_of(seed, "b_t").random(len(noise)) < 0.01) + 0.5 * noise
    ),
    "heavy-tailed": lambda level, noise, _, seed: level + 0.5 * random_of(seed, "s_t").standard_t(2, len(noise)),
    "random walk": lambda level, noise, *_: level + 0.1 * np.cumsum(noise),
}


def synthetic_trace(kind: str, steps: int, seed: int, level: float = _LEVEL) -> Trace:
    """Return a synthetic trace, whose ceilings are known and whose gradients show them.

    Args:
        kind (str): one of those above, which is also the name of the trace.
        steps (int): how many, at least 1.
        seed (int): at least 0; the same seed gives the same trace.
        level (float): log2 of the ceilings that the formula starts from. Default: 18.

    Raises:
        KeyError: if there is no such kind.
        TypeError: if ``steps`` or ``seed`` is not an integer.
        ValueError: if one of the two is too small.

    Examples:
        >>> len(synthetic_trace("random walk", steps=100, seed=0))
        100
    """
    count = checked_steps(steps)
    noise = random_of(seed, "n_t").standard_normal(count)
    log2_ceiling = _FORMULAS[kind](level, noise, np.arange(count) / max(count - 1, 1), seed)
    return with_gradients(Trace.exact(kind, np.exp2(np.clip(log2_ceiling, *_EXPONENTS))))


def synthetic_traces(steps: int, seed: int) -> dict[str, Trace]:
    """Return one trace of each of the eight kinds by its name, as :func:`synthetic_trace` makes it.

    Examples:
        >>> list(synthetic_traces(10, seed=0))[:4]
        ['stationary', 'slowly rising', 'slowly falling', 'sudden drop']
    """
    return {kind: synthetic_trace(kind, steps, seed) for kind in _FORMULAS}

r"""Made traces, each of one behaviour and repeatable by its seed.

With :math:`t` from 0 to steps - 1, :math:`T` = max(steps - 1, 1) and independent standard normal numbers :math:`n_t`,
log2 of the ceiling of step t is:

.. code-block:: text

    stationary       level + spread * n_t
    slowly rising    level + rise * (t / T - 1/2) + spread * n_t
    slowly falling   level - fall * (t / T - 1/2) + spread * n_t
    sudden drop      level - bits * [t >= steps // 2] + spread * n_t
    sudden rise      level + bits * ([t >= steps // 2] - 1) + spread * n_t
    spikes           level - bits * b_t + spread * n_t        b_t is 1 with probability 1 / every, else 0
    heavy-tailed     level + spread * s_t                     s_t: Student's t, 2 degrees of freedom, infinite variance
    random walk      level + spread * (n_0 + ... + n_t)

Levels, spreads and heights are in bits. Every function takes ``steps`` (int), at least 1, and ``seed`` (int), at least
0; the same seed gives the same trace. It returns a ``Trace`` whose ceilings are known, and raises ``TypeError`` where
one of the two is not an integer and ``ValueError`` where one is too small.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.traces.gradients import checked_steps, random_of, with_gradients
from mindformers_adaptive.lab.traces.trace import Trace

__all__ = ["heavy_tailed", "random_walk", "slowly_falling", "slowly_rising", "spikes", "stationary"]
__all__ += ["sudden_drop", "sudden_rise", "synthetic_traces"]

# A small Llama trained in FP16 on CPU kept its dynamic loss scale between 2^16 and 2^20.
_LEVEL = 18.0

# The ceilings stay within the exponents of normal float32 numbers, as loss scales do.
_EXPONENTS = (-126.0, 127.0)


def stationary(steps: int, seed: int, level: float = _LEVEL, spread: float = 0.5) -> Trace:
    """Return ceilings that vary about one level.

    Examples:
        >>> len(stationary(100, seed=0))
        100
    """
    return _made("stationary", steps, seed, lambda noise, _: level + spread * noise)


def slowly_rising(steps: int, seed: int, level: float = _LEVEL, rise: float = 6.0, spread: float = 0.5) -> Trace:
    """Return ceilings that rise along a straight line."""
    return _made("slowly rising", steps, seed, lambda noise, part: level + rise * (part - 0.5) + spread * noise)


def slowly_falling(steps: int, seed: int, level: float = _LEVEL, fall: float = 6.0, spread: float = 0.5) -> Trace:
    """Return ceilings that fall along a straight line."""
    return _made("slowly falling", steps, seed, lambda noise, part: level - fall * (part - 0.5) + spread * noise)


def sudden_drop(steps: int, seed: int, level: float = _LEVEL, bits: float = 10.0, spread: float = 0.5) -> Trace:
    """Return ceilings that drop in the middle."""
    return _made("sudden drop", steps, seed, lambda noise, _: level - bits * _second_half(noise) + spread * noise)


def sudden_rise(steps: int, seed: int, level: float = _LEVEL, bits: float = 10.0, spread: float = 0.5) -> Trace:
    """Return ceilings that jump up in the middle."""
    return _made("sudden rise", steps, seed, lambda noise, _: level + bits * (_second_half(noise) - 1) + spread * noise)


def spikes(
    steps: int, seed: int, level: float = _LEVEL, bits: float = 6.0, every: float = 100.0, spread: float = 0.5
) -> Trace:
    """Return ceilings with single low steps; ``every`` is by default 100, a tenth of the largest window of 1000."""

    def low(noise: NDArray[np.float64]) -> NDArray[np.bool_]:
        return random_of(seed, "b_t").random(len(noise)) < 1.0 / every

    return _made("spikes", steps, seed, lambda noise, _: level - bits * low(noise) + spread * noise)


def heavy_tailed(steps: int, seed: int, level: float = _LEVEL, spread: float = 0.5) -> Trace:
    """Return ceilings with rare far outliers."""

    def log2_ceiling(noise: NDArray[np.float64], _: NDArray[np.float64]) -> NDArray[np.float64]:
        return level + spread * random_of(seed, "s_t").standard_t(2, len(noise))

    return _made("heavy-tailed", steps, seed, log2_ceiling)


def random_walk(steps: int, seed: int, level: float = _LEVEL, spread: float = 0.1) -> Trace:
    """Return ceilings that wander: with the default spread, 1000 steps lead about 3 bits away."""
    return _made("random walk", steps, seed, lambda noise, _: level + spread * np.cumsum(noise))


def synthetic_traces(steps: int, seed: int) -> dict[str, Trace]:
    """Return one trace of each of the eight kinds, with the defaults of its function, by its name.

    Examples:
        >>> list(synthetic_traces(10, seed=0))[:4]
        ['stationary', 'slowly rising', 'slowly falling', 'sudden drop']
    """
    kinds = (stationary, slowly_rising, slowly_falling, sudden_drop, sudden_rise, spikes, heavy_tailed, random_walk)
    traces = [kind(steps, seed) for kind in kinds]
    return {trace.name: trace for trace in traces}


def _made(
    name: str,
    steps: int,
    seed: int,
    log2_ceiling: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]],
) -> Trace:
    """A trace from its formula, which takes the normal numbers and the part of the run that is over, 0 to 1."""
    count = checked_steps(steps)
    noise = random_of(seed, "n_t").standard_normal(count)
    part = np.arange(count) / max(count - 1, 1)
    return with_gradients(Trace.exact(name, np.exp2(np.clip(log2_ceiling(noise, part), *_EXPONENTS))))


def _second_half(noise: NDArray[np.float64]) -> NDArray[np.float64]:
    return (np.arange(len(noise)) >= len(noise) // 2).astype(np.float64)

"""Made traces, each of one behaviour and repeatable by its seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.traces.gradients import showing
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.rule.checks import require_integer

__all__ = [
    "heavy_tailed",
    "random_walk",
    "slowly_falling",
    "slowly_rising",
    "spikes",
    "stationary",
    "sudden_drop",
    "sudden_rise",
    "synthetic_traces",
]

# A small Llama trained in FP16 on CPU kept its dynamic loss scale between 2^16 and 2^20.
_LEVEL = 18.0

_PLAIN_INTEGER = "Write it without quotes and without a decimal point."

# The ceilings stay within the exponents of normal float32 numbers, as loss scales do.
_EXPONENTS = (-126.0, 127.0)


def stationary(steps: int, seed: int, level: float = _LEVEL, spread: float = 0.5) -> Trace:
    r"""Return ceilings that vary about one level: :math:`\log_2 c_t = level + spread \cdot n_t`.

    Here and below :math:`n_t` are independent standard normal numbers, and :math:`t` runs from 0 to steps - 1.

    Args:
        steps (int): how many, at least 1.
        seed (int): at least 0; the same seed gives the same trace.
        level (float): log2 of the middle ceiling. Default: 18, the middle of the scales (2^16 to 2^20) that a small
            Llama in FP16 could bear.
        spread (float): standard deviation of log2 of the ceiling, in bits. Default: 0.5.

    Returns:
        Trace, whose ceilings are known.

    Raises:
        TypeError: if ``steps`` or ``seed`` is not an integer.
        ValueError: if one of them is too small.

    Examples:
        >>> len(stationary(100, seed=0))
        100
    """
    return _made("stationary", steps, seed, lambda noise, _: level + spread * noise)


def slowly_rising(steps: int, seed: int, level: float = _LEVEL, rise: float = 6.0, spread: float = 0.5) -> Trace:
    r"""Return ceilings that rise by ``rise`` bits.

    :math:`\log_2 c_t = level + rise \cdot (t/T - 1/2) + spread \cdot n_t`,
    where :math:`T` is steps - 1, or 1 for a single step. Arguments, returned value and errors as in :func:`stationary`;
    ``rise`` is in bits. Default: 6.
    """
    return _made("slowly rising", steps, seed, lambda noise, part: level + rise * (part - 0.5) + spread * noise)


def slowly_falling(steps: int, seed: int, level: float = _LEVEL, fall: float = 6.0, spread: float = 0.5) -> Trace:
    r"""Return ceilings that fall by ``fall`` bits.

    :math:`\log_2 c_t = level - fall \cdot (t/T - 1/2) + spread \cdot n_t`,
    where :math:`T` is steps - 1, or 1 for a single step. Arguments, returned value and errors as in :func:`stationary`;
    ``fall`` is in bits. Default: 6.
    """
    return _made("slowly falling", steps, seed, lambda noise, part: level - fall * (part - 0.5) + spread * noise)


def sudden_drop(steps: int, seed: int, level: float = _LEVEL, bits: float = 10.0, spread: float = 0.5) -> Trace:
    r"""Return ceilings that drop by 2^bits in the middle.

    :math:`\log_2 c_t = level - bits \cdot [t \ge T'] + spread \cdot n_t`,
    where :math:`T'` is steps // 2. Arguments, returned value and errors as in :func:`stationary`. Default for
    ``bits``: 10.
    """
    return _made("sudden drop", steps, seed, lambda noise, _: level - bits * _second_half(noise) + spread * noise)


def sudden_rise(steps: int, seed: int, level: float = _LEVEL, bits: float = 10.0, spread: float = 0.5) -> Trace:
    r"""Return ceilings that rise by 2^bits in the middle.

    :math:`\log_2 c_t = level + bits \cdot ([t \ge T'] - 1) + spread \cdot n_t`,
    where :math:`T'` is steps // 2. Arguments, returned value and errors as in :func:`stationary`. Default for
    ``bits``: 10.
    """
    return _made("sudden rise", steps, seed, lambda noise, _: level + bits * (_second_half(noise) - 1) + spread * noise)


def spikes(
    steps: int, seed: int, level: float = _LEVEL, bits: float = 6.0, every: float = 100.0, spread: float = 0.5
) -> Trace:
    r"""Return ceilings with single low steps: :math:`\log_2 c_t = level - bits \cdot b_t + spread \cdot n_t`.

    :math:`b_t` is 1 with probability 1 / every, else 0. Arguments, returned value and errors as in :func:`stationary`.
    Default for ``bits``: 6; for ``every``: 100 steps, a tenth of the largest scale window of 1000.
    """
    return _made(
        "spikes",
        steps,
        seed,
        lambda noise, _: level - bits * (_generator(seed, "b_t").random(len(noise)) < 1.0 / every) + spread * noise,
    )


def heavy_tailed(steps: int, seed: int, level: float = _LEVEL, spread: float = 0.5) -> Trace:
    r"""Return ceilings with rare far outliers: :math:`\log_2 c_t = level + spread \cdot s_t`.

    :math:`s_t` follow Student's t distribution with 2 degrees of freedom, whose variance is infinite. Arguments,
    returned value and errors as in :func:`stationary`.
    """
    return _made(
        "heavy-tailed",
        steps,
        seed,
        lambda noise, _: level + spread * _generator(seed, "s_t").standard_t(2, len(noise)),
    )


def random_walk(steps: int, seed: int, level: float = _LEVEL, spread: float = 0.1) -> Trace:
    r"""Return ceilings that wander: :math:`\log_2 c_t = level + spread \cdot \sum_{k \le t} n_k`.

    Arguments, returned value and errors as in :func:`stationary`; ``spread`` is for one step. Default: 0.1, so 1000
    steps lead about 3 bits away.
    """
    return _made("random walk", steps, seed, lambda noise, _: level + spread * np.cumsum(noise))


def synthetic_traces(steps: int, seed: int) -> dict[str, Trace]:
    """Return one trace of each kind, with the defaults of its constructor, by its name.

    Args:
        steps (int): how many each has, at least 1.
        seed (int): at least 0.

    Returns:
        dict[str, Trace], the eight kinds.

    Raises:
        TypeError: if an argument is not an integer.
        ValueError: if one is too small.

    Examples:
        >>> list(synthetic_traces(10, seed=0))[:4]
        ['stationary', 'slowly rising', 'slowly falling', 'sudden drop']
    """
    kinds: tuple[Callable[[int, int], Trace], ...] = (
        stationary,
        slowly_rising,
        slowly_falling,
        sudden_drop,
        sudden_rise,
        spikes,
        heavy_tailed,
        random_walk,
    )
    traces = [kind(steps, seed) for kind in kinds]
    return {trace.name: trace for trace in traces}


def _made(
    name: str,
    steps: int,
    seed: int,
    log2_ceiling: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]],
) -> Trace:
    """A trace from its formula, which takes the normal numbers and the part of the run that is over, 0 to 1."""
    count = require_integer("steps", steps, 1, _PLAIN_INTEGER)
    noise = _generator(require_integer("seed", seed, 0, _PLAIN_INTEGER), "n_t").standard_normal(count)
    part = np.arange(count) / max(count - 1, 1)
    return showing(Trace.exact(name, np.exp2(np.clip(log2_ceiling(noise, part), *_EXPONENTS))))


def _generator(seed: int, symbol: str) -> np.random.Generator:
    """Independent numbers for each symbol of a formula."""
    return np.random.default_rng([int(seed), *symbol.encode()])


def _second_half(noise: NDArray[np.float64]) -> NDArray[np.float64]:
    return (np.arange(len(noise)) >= len(noise) // 2).astype(np.float64)

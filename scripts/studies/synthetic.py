r"""Synthetic traces of ceilings (largest loss scales without overflow) of several kinds, reproducible by a seed.

For step :math:`t` from 0 to steps - 1, with :math:`T` = steps - 1 and independent standard normal numbers
:math:`n_t`, log2 of the ceiling is:

.. code-block:: text

    stationary       level + n_t / 2
    slowly rising    level + 6 * (t / T - 1/2) + n_t / 2
    slowly falling   level - 6 * (t / T - 1/2) + n_t / 2
    sudden drop      level - 10 * [t >= steps // 2] + n_t / 2
    sudden rise      level + 10 * ([t >= steps // 2] - 1) + n_t / 2
    spikes           level - 6 * b_t + n_t / 2            b_t is 1 with probability 1 / 100, else 0
    heavy-tailed     level + s_t / 2                      s_t: Student's t, 2 degrees of freedom, infinite variance
    random walk      level + (n_0 + ... + n_t) / 10       1000 steps lead about 3 bits away

A condition in brackets is 1 if it holds, else 0. The level is 18. Spikes come once in 100 steps on average:
a tenth of 1000 steps, the default of the largest window.

If the gradients of a training are larger for a while, because of other data or a second loss, this is a *regime*. A
regime lasts 30 to 400 steps, evenly distributed. log2 of the ceiling is :math:`level - d_t + n_t / 4`, where the depth
:math:`d_t` is 4 to 14 bits in a regime, evenly distributed, and 0 outside of regimes:

.. code-block:: text

    one-off regime       a single regime, after steps // 2 steps
    rare regimes         1000 to 3000 steps between regimes
    alternating regimes  30 to 400 steps between regimes
    ramped regimes       as alternating regimes, but d_t is averaged over the last 20 steps
    levels               no steps between regimes; d_t is 0 to 14, 4 to 14 bits away from d_t of the last regime

Each kind of regime also exists with ``with spikes`` behind its name. Then 6 * b_t is subtracted as in ``spikes``.
"""

import dataclasses

import numpy as np

from mindformers_adaptive.lab.running_rule import start_rule
from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules.formats import FLOAT16

# log2 of the usual ceiling: the dynamic loss scale of a small Llama in FP16 on CPU stayed between 2^16 and 2^20.
_LEVEL = 18.0

# A regime is a period of lower ceilings in a synthetic trace. The ranges are for the length of a regime in steps, for
# how many bits a regime lowers the ceilings, and for the steps between regimes in "rare regimes". The last number says
# over how many steps the ceilings fall or rise in "ramped regimes".
_LENGTHS, _DEPTHS, _RARE, _RAMP = (30, 400), (4.0, 14.0), (1000, 3000), 20

_WITH_SPIKES = " with spikes"


def dynamic(scale_window, **arguments):
    """Return the adaptive rule with one window: MindSpore's dynamic loss scaling, whose scale stays finite."""
    windows = dict.fromkeys(("scale_window", "max_scale_window", "min_scale_window"), scale_window)
    return start_rule("adaptive", **windows, **arguments)


def _second_half(noise):
    return (np.arange(len(noise)) >= len(noise) // 2).astype(np.float64)


def _spikes(steps, seed):
    return 6.0 * (random_of(seed, "b_t").random(steps) < 0.01)


# For each kind of trace, a function that returns log2 of the ceilings. Arguments of the function: the noise
# n_t, how much of the training is over (t / T, from 0 to 1), and the seed.
_FORMULAS = {
    "stationary": lambda noise, *_: _LEVEL + 0.5 * noise,
    "slowly rising": lambda noise, part, _: _LEVEL + 6.0 * (part - 0.5) + 0.5 * noise,
    "slowly falling": lambda noise, part, _: _LEVEL - 6.0 * (part - 0.5) + 0.5 * noise,
    "sudden drop": lambda noise, *_: _LEVEL - 10.0 * _second_half(noise) + 0.5 * noise,
    "sudden rise": lambda noise, *_: _LEVEL + 10.0 * (_second_half(noise) - 1) + 0.5 * noise,
    "spikes": lambda noise, _, seed: _LEVEL - _spikes(len(noise), seed) + 0.5 * noise,
    "heavy-tailed": lambda noise, _, seed: _LEVEL + 0.5 * random_of(seed, "s_t").standard_t(2, len(noise)),
    "random walk": lambda noise, *_: _LEVEL + 0.1 * np.cumsum(noise),
}


KINDS = tuple(_FORMULAS)

# A regime is a period of lower ceilings. For each kind of trace with regimes, a function that returns the number of
# steps before the next regime. Arguments of the function: the number of steps in the trace, and a random generator.
_BETWEEN = {
    "one-off regime": lambda steps, _: steps // 2,
    "rare regimes": lambda _, random: int(random.integers(*_RARE, endpoint=True)),
    "alternating regimes": lambda _, random: int(random.integers(*_LENGTHS, endpoint=True)),
    "ramped regimes": lambda _, random: int(random.integers(*_LENGTHS, endpoint=True)),
    "levels": lambda *_: 0,
}

REGIMES = tuple(kind + spikes for spikes in ("", _WITH_SPIKES) for kind in _BETWEEN)


def regime_levels(kind, steps, seed):
    """Return log2 of the ceilings before noise and spikes are added, to show where periods of low ceilings begin.

    Args:
        kind (str): one of ``REGIMES``.
        steps (int), seed (int): as for :func:`synthetic_trace`.

    Returns:
        NDArray, float64 of shape (steps,).

    Examples:
        >>> levels = regime_levels("one-off regime", steps=1000, seed=0)
        >>> int((levels < 18).argmax()), float(levels[-1])
        (500, 18.0)
    """
    pattern = kind.removesuffix(_WITH_SPIKES)
    random = random_of(seed, pattern)
    depths, position, depth = np.zeros(steps + _RAMP), 0, 0.0
    while position < steps:
        begin = position + _BETWEEN[pattern](steps, random)
        position = begin + int(random.integers(*_LENGTHS, endpoint=True))
        depth = _next_depth(depth, random) if pattern == "levels" else random.uniform(*_DEPTHS)
        depths[begin:position] = depth
        if pattern == "one-off regime":
            break
    if pattern == "ramped regimes":
        depths = np.convolve(depths, np.full(_RAMP, 1 / _RAMP))
    return _LEVEL - depths[:steps]


def _next_depth(depth, random):
    """Return by how many bits the next regime lowers the ceiling: a random number from 0 to 14, not near ``depth``.

    The number differs from ``depth``, the bits of the last regime, by 4 to 14 bits. The first draw is above ``depth``.
    If it is above 14 bits, draw again, above or below ``depth``, until the number is from 0 to 14.
    """
    change = random.uniform(*_DEPTHS)
    while not 0.0 <= depth + change <= _DEPTHS[1]:
        change = random.choice((-1.0, 1.0)) * random.uniform(*_DEPTHS)
    return float(depth + change)


def synthetic_trace(kind, steps, seed):
    """Return a synthetic trace with known ceilings, and with gradients that imply these ceilings.

    Args:
        kind (str): one of the kinds in the tables of this module, also the name of the trace.
        steps (int): how many, at least 2.
        seed (int): at least 0; the same seed gives the same trace.

    Returns:
        Trace, with ``largest_gradient`` in each step.

    Examples:
        >>> len(synthetic_trace("random walk", steps=100, seed=0))
        100
    """
    noise = random_of(seed, "n_t").standard_normal(steps)
    if kind in REGIMES:
        spikes = _spikes(steps, seed) if kind.endswith(_WITH_SPIKES) else 0.0
        log2_ceiling = regime_levels(kind, steps, seed) - spikes + 0.25 * noise
    else:
        log2_ceiling = _FORMULAS[kind](noise, np.arange(steps) / (steps - 1), seed)
    return with_gradients(Trace.exact(kind, np.exp2(log2_ceiling)))


def with_gradients(trace, offset=0.0, spread=0.0, seed=0, gradient_format=FLOAT16):
    r"""Return a copy of a trace with gradients that imply the trace's ceilings, or too high or too low ceilings.

    :math:`largest\_gradient_t = largest / (c_t \cdot 2^{offset + spread \cdot n_t})`, where *largest* is the
    largest number of the format, :math:`c_t` the ceiling, and :math:`n_t` are independent standard normal numbers.

    Args:
        trace (Trace): the trace that the gradients are added to.
        offset (float): how many bits the ceilings that the gradients imply are too high, as when activation gradients
            overflow first. A negative offset makes them too low, as when a gradient is summed in float32. Default: 0.
        spread (float): standard deviation of the offset, in bits. Default: 0.
        seed (int): seed of the random offsets, at least 0. Default: 0.
        gradient_format (Format): the format of the gradients. Default: float16.

    """
    noise = random_of(seed, "offset").standard_normal(len(trace)) if spread else 0.0
    gradients = gradient_format.largest / trace.ceiling / np.exp2(offset + spread * noise)
    return dataclasses.replace(trace, largest_gradient=gradients, gradient_format=gradient_format)


def random_of(seed, symbol):
    """Return a random generator for one symbol of a formula. Different symbols get independent random numbers."""
    return np.random.default_rng([seed, *symbol.encode()])

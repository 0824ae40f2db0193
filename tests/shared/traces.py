"""Made-up traces of ceilings (largest loss scales without overflow), with gradients that show them."""

import dataclasses

import numpy as np

from mindformers_adaptive.record.trace import Trace


def with_gradients(trace, bits=0.0):
    """Return a trace with gradients that show ceilings so many bits too high."""
    with np.errstate(divide="ignore"):
        gradients = 65504.0 / trace.ceiling / 2.0**bits
    return dataclasses.replace(trace, largest_gradient=gradients)


def made_trace(name, steps, seed=0):
    """Return a trace of noisy ceilings around 2^18, which drop by 10 bits in "sudden drop", or in spikes."""
    random = np.random.default_rng([seed, *name.encode()])
    drop = np.arange(steps) >= steps // 2 if name == "sudden drop" else random.random(steps) < 0.01
    exponents = 18 - (10.0 if name == "sudden drop" else 6.0) * drop + 0.5 * random.standard_normal(steps)
    return with_gradients(Trace.exact(name, np.exp2(exponents)))

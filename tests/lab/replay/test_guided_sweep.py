"""The guided rule on many traces at once takes the steps of the rule, one by one."""

import dataclasses

import numpy as np
import pytest

from mindformers_adaptive.lab.policies import make_policy
from mindformers_adaptive.lab.replay.guided_sweep import guided_sweep
from mindformers_adaptive.lab.replay.simulate import replay
from mindformers_adaptive.lab.traces.gradients import INDEPENDENT_CEILINGS, independent_ceiling, with_gradients
from mindformers_adaptive.lab.traces.synthetic import synthetic_traces
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.rules.guided import GuidedRule

STEPS = 800


def traces():
    made = list(synthetic_traces(STEPS, seed=0).values())
    hidden = [with_gradients(trace, offset, 0.4, seed=1) for trace in made for offset in (3.0, 8.0, -2.0)]
    own = [independent_ceiling(STEPS, 0, *numbers) for numbers in INDEPENDENT_CEILINGS]
    silent = dataclasses.replace(made[0], largest_gradient=None)
    now_and_then = np.where(np.arange(STEPS) % 3 == 0, made[3].largest_gradient, [np.nan, 0.0] * (STEPS // 2))
    return [*made, *hidden, *own, silent, dataclasses.replace(made[3], largest_gradient=now_and_then)]


@pytest.mark.parametrize(("rate", "scale"), [(1.0, 2.0**32), (5.0, 2.0**16), (50.0, 1.0), (1000.0, 2.0**20)])
def test_every_lane_takes_the_steps_of_the_rule(rate, scale):
    lanes = traces()
    at_once = guided_sweep([GuidedRule(rate)] * len(lanes), lanes, scale)
    for trace, measures in zip(lanes, at_once, strict=True):
        alone = replay(make_policy("guided", loss_scale_value=scale, exchange_rate=rate), trace).measures
        assert measures == dataclasses.replace(alone, window_changes=0), trace.name


def test_lanes_may_have_rules_of_their_own():
    arguments = [{}, {"exchange_rate": 20.0, "max_loss_scale": 2.0**19}, {"min_loss_scale": 2.0**17}]
    trace = synthetic_traces(STEPS, seed=1)["random walk"]
    at_once = guided_sweep([GuidedRule(**own) for own in arguments], [trace] * 3, 2.0**18)
    alone = [replay(make_policy("guided", loss_scale_value=2.0**18, **own), trace).measures for own in arguments]
    assert at_once == [dataclasses.replace(one, window_changes=0) for one in alone]
    assert len({one.headroom_lost for one in at_once}) == 3


@pytest.mark.parametrize(("rules", "lengths"), [(1, [5, 5]), (2, [5, 6]), (0, [])], ids=["rules", "lengths", "nothing"])
def test_rules_and_traces_that_do_not_fit_are_refused(rules, lengths):
    made = [Trace.exact("made", [8.0] * length) for length in lengths]
    with pytest.raises(ValueError, match=r"'rules' and 'traces' must have one entry for each other"):
        guided_sweep([GuidedRule()] * rules, made, 2.0**16)

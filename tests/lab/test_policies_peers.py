"""The policies equal what the systems' own test suites state."""

import itertools
import json
from pathlib import Path

import pytest

from mindformers_adaptive.lab.policies import POLICY_NAMES, make_policy

HERE = Path(__file__).parent
PEER_CASES = json.loads((HERE / "peer_cases.json").read_text(encoding="utf-8"))
# "." is a clean step and "!" an overflow; the scales are those after each step, or null where the suite states none.
PEER_SEQUENCES = json.loads((HERE / "peer_sequences.json").read_text(encoding="utf-8"))

SMALLEST_NORMAL_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


def id_of(case):
    return f"{case['policy']}-{case['path'].rpartition('::')[2]}"


@pytest.mark.parametrize("case", PEER_CASES, ids=id_of)
def test_case_comes_out_exactly(case):
    policy = make_policy(case["policy"], **case["params"])
    assert [policy.step(overflow) for overflow in case["overflow"]] == case["expected_scale"]


@pytest.mark.parametrize("case", PEER_SEQUENCES, ids=id_of)
def test_sequence_comes_out_exactly(case):
    policy = make_policy(case["policy"], **case["params"])
    for step, stated in zip(case["steps"], case["expected_scale"], strict=True):
        assert policy.step(step == "!") == stated or stated is None


def test_every_policy_of_another_system_has_a_sequence_of_its_suite():
    # DeepSpeed's suite does not test its ZeRO scaler class by itself, and metaseq's not its scaler.
    covered = {case["policy"] for case in PEER_CASES + PEER_SEQUENCES}
    assert set(POLICY_NAMES) - covered == {"adaptive", "guided", "fixed", "deepspeed", "metaseq"}


@pytest.mark.parametrize("extra", [0, 4, 130, 1000])
@pytest.mark.parametrize(("init_scale", "growth_factor"), list(itertools.product([1, 1024, 65536], [1.0, 2.0, 4.0])))
def test_grid_of_the_hysteresis_kernel(init_scale, growth_factor, extra):
    # Apex tests/L0/run_amp/test_update_scale_hysteresis.py::test_fuzz states the scale after each of four stretches;
    # it draws the numbers of extra steps, of which these reach the subnormal numbers, which the kernel turns into 0.
    for backoff_factor, interval, hysteresis in itertools.product([0.5, 0.25], [10, 100], [10, 100]):
        policy = make_policy(
            "apex_hysteresis",
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=interval,
            hysteresis=hysteresis,
        )
        assert replay(policy, [True] * (hysteresis - 1)) == init_scale
        assert replay(policy, [False] * (interval - 1)) == init_scale
        dropped = init_scale * backoff_factor ** (1 + extra)
        dropped = dropped if dropped >= SMALLEST_NORMAL_FLOAT32 else 0.0
        assert replay(policy, [True] * (hysteresis + extra)) == dropped
        raises = 1 + extra // interval
        while dropped * growth_factor**raises > LARGEST_FLOAT32:
            raises -= 1
        assert replay(policy, [False] * (interval + extra)) == dropped * growth_factor**raises


def replay(policy, overflows):
    for overflow in overflows:
        policy.step(overflow)
    return policy.loss_scale

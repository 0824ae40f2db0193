"""The policies give the results that the test suites of the original systems state."""

import json
from pathlib import Path

import pytest

from mindformers_adaptive.lab.policies import POLICY_NAMES, make_policy

# In a case, "." is a clean step and "!" an overflow; each scale is the scale after a step.
PEER_CASES = json.loads(Path(__file__).with_name("peer_cases.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", PEER_CASES, ids=lambda case: f"{case['policy']}-{case['path'].rpartition('::')[2]}")
def test_case_comes_out_exactly(case):
    policy = make_policy(case["policy"], **case["params"])
    assert [policy.step(step == "!") for step in case["steps"]] == case["expected_scale"]


def test_every_policy_of_another_system_has_a_case_of_its_suite():
    # DeepSpeed's suite does not test its ZeRO scaler class by itself.
    covered = {case["policy"] for case in PEER_CASES}
    assert set(POLICY_NAMES) - covered == {"adaptive", "guided", "fixed", "deepspeed"}

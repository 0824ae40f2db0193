"""The lab's policies give the loss scales that the test suites of the original systems, such as DeepSpeed, expect."""

import json
from pathlib import Path

import pytest

from mindformers_adaptive.lab.policies import POLICY_NAMES, make_policy

# In the events of a case, "." is a step without overflow and "!" an overflow. Each expected scale is the loss scale
# after a step.
PEER_CASES = json.loads(Path(__file__).with_name("peer_cases.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", PEER_CASES, ids=lambda case: f"{case['policy']}-{case['path'].rpartition('::')[2]}")
def test_case_comes_out_exactly(case):
    policy = make_policy(case["policy"], **case["params"])
    assert [policy.step(step == "!") for step in case["steps"]] == case["expected_scale"]


def test_every_policy_of_another_system_has_a_case_of_its_suite():
    # DeepSpeed's tests never test ZeRO's loss scaler class alone, so the policy "deepspeed" has no case from them.
    covered = {case["policy"] for case in PEER_CASES}
    assert set(POLICY_NAMES) - covered == {"adaptive", "guided", "fixed", "deepspeed"}

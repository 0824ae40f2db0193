"""The lab's rules give the loss scales that the test suites of the original systems, such as DeepSpeed, expect."""

import json
from pathlib import Path

import pytest

from mindformers_adaptive.lab.running_rule import RULE_NAMES, start_rule

# In the events of a case, "." is a step without overflow and "!" an overflow. Each expected scale is the loss scale
# after a step.
PEER_CASES = json.loads(Path(__file__).with_name("peer_cases.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", PEER_CASES, ids=lambda case: f"{case['rule']}-{case['path'].rpartition('::')[2]}")
def test_case_comes_out_exactly(case):
    running = start_rule(case["rule"], **case["params"])
    assert [running.step(step == "!") for step in case["steps"]] == case["expected_scale"]


def test_every_rule_of_another_system_has_a_case_of_its_suite():
    # DeepSpeed's tests never test ZeRO's loss scaler class alone, so the rule "deepspeed" has no case from them.
    covered = {case["rule"] for case in PEER_CASES}
    assert set(RULE_NAMES) - covered == {"adaptive", "guided", "fixed", "deepspeed"}

"""What users check on an Ascend, done on a CPU."""

import check_on_ascend
import pytest
from conftest import ROOT

from mindformers_adaptive.rules.adaptive import AdaptiveRule

SCRIPT = ROOT / "scripts" / "check_on_ascend.py"


@pytest.mark.parametrize("check", ["steps", "resume"])
def test_the_report_says_that_all_is_as_it_should_be(run_forked, check):
    printed = run_forked(SCRIPT, check, "--device", "CPU").stdout
    assert "device: CPU" in printed
    assert all(f"| {name} | as it should be |" in printed for name in check_on_ascend.CELLS)


def test_a_step_that_does_not_follow_the_rule_is_reported(graph_mode, monkeypatch):
    step = AdaptiveRule.step
    monkeypatch.setattr(AdaptiveRule, "step", lambda rule, state, *seen: step(rule, step(rule, state, True), *seen))
    said = check_on_ascend.verdict(lambda: check_on_ascend.follow_the_rule("adaptive"))
    assert said.startswith("AssertionError: step 1: overflow ")
    assert "but the rule says" in said

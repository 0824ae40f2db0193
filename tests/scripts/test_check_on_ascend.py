"""The script check_on_ascend, with which users check this package on an Ascend, passes on a CPU."""

import re

import pytest

from scripts.ascend import check_on_ascend
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "scripts" / "ascend" / "check_on_ascend.py"


@pytest.mark.parametrize("check", ["steps", "resume"])
def test_the_report_says_that_all_is_as_it_should_be(run_forked, check):
    printed = run_forked(SCRIPT, check, "--device", "CPU").stdout
    assert "device: CPU" in printed
    assert all(f"| {name} | as it should be |" in printed for name in check_on_ascend.CELLS)


def test_a_step_that_does_not_follow_the_rule_is_reported(graph_mode, monkeypatch):
    monkeypatch.setattr(check_on_ascend, "OVERFLOWS_FROM", 2.0**100)
    said = check_on_ascend.verdict(lambda: check_on_ascend.follow_the_rule("adaptive"))
    assert re.match(r"AssertionError: step \d+: .*overflow True and .*, but the rule .* False ", said)


def test_small_cases_that_one_process_can_compile_are_compiled(graph_mode):
    checks = dict(check_on_ascend.compile_checks())
    assert {"cell/adaptive", "step/910B/guided", "mf_step/guided", "scaler/guided"} <= set(checks)
    assert not [
        name for name in checks if "910A" in name or "stock" in name or name.startswith(("control", "pipeline"))
    ]
    assert check_on_ascend.verdict(checks["cell/adaptive"]) == "as it should be"

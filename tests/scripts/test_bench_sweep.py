"""The benchmark of the sweep: what it promises of speed and memory holds, and no configuration differs."""

import pytest
from conftest import ROOT


@pytest.mark.slow
@pytest.mark.alone
def test_sweep_is_as_fast_as_promised_and_equals_the_rule(run_python):
    printed = run_python(ROOT / "scripts" / "bench_sweep.py").stdout
    assert "configurations whose results differ: 0\n" in printed

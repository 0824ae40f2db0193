"""The benchmark of the pass over the gradients: what it prints, and the share of a step that this package promises."""

import re

import pytest
from conftest import ROOT

SCRIPT = ROOT / "scripts" / "bench_gradient_pass.py"


@pytest.mark.slow
def test_the_pass_over_the_gradients_takes_at_most_3_percent_of_the_demos_step(run_forked):
    printed = run_forked(SCRIPT, "--rounds", 10).stdout
    assert printed.startswith("21 gradients with 492160 elements; medians of 10 rounds\n")
    shares = [float(share) for share in re.findall(r" ms +(\d+\.\d\d)%", printed)]
    assert shares[0] == 100.0
    assert len(shares) == 5
    assert all(0 < share <= 3 for share in shares[2:4]), printed
    assert re.search(
        r"^added to the step on a CPU: -?\d+\.\d\d%, with track_per_parameter -?\d+", printed, re.MULTILINE
    )

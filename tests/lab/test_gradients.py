"""Largest loss scales without overflow (ceilings), as gradients imply them and as gradient sweeps measure them."""

import json

import numpy as np
import pytest

from mindformers_adaptive.lab.ceilings import from_gradient_ranges
from tests.shared.records import gradient_line, unscaled_gradients


def sweep_line(step, *batches):
    tried = [[{"loss_scale": scale, "overflow": mark == "!"} for scale, mark in batch] for batch in batches]
    return json.dumps({"step": step, "batches": [{"loss_scales": batch} for batch in tried]})


def test_sweep_bounds_the_ceiling(tmp_path):
    file = tmp_path / "gradient_ranges.jsonl"
    lines = [
        sweep_line(100, [(64, "."), (512, "."), (4096, "!")]),
        # The ceiling of a sweep is the lowest ceiling of all batches, here the first batch's ceiling.
        sweep_line(200, [(64, "."), (512, "!"), (4096, "!")], [(64, "."), (512, "."), (4096, ".")]),
        sweep_line(300, [(64, "!"), (512, "!")]),
        sweep_line(400, [(64, "."), (512, ".")]),
        # The loss scale 512 overflows, so the ceiling is below 512, although the higher loss scale 4096 did not
        # overflow.
        sweep_line(500, [(64, "."), (512, "!"), (4096, ".")]),
    ]
    file.write_text("\n".join(lines) + "\n")
    trace = from_gradient_ranges(file)
    assert trace.name == "gradient_ranges.jsonl"
    assert trace.lower_bound.tolist() == trace.ceiling.tolist() == [512, 64, 0, 512, 64]
    assert trace.upper_bound.tolist() == [4096, 512, 64, np.inf, 512]


def test_sweep_has_the_largest_gradient_that_fits(tmp_path):
    file = tmp_path / "gradient_ranges.jsonl"
    lines = [gradient_line(10, 64.0, 4096.0, 2.0**40), gradient_line(20, 64.0, 2.0**40)]
    file.write_text("\n".join(map(json.dumps, lines)))
    trace = from_gradient_ranges(file)
    assert trace.lower_bound.tolist() == [4096.0, 64.0]
    expected = [max(np.abs(array).max() for array in unscaled_gradients(step).values()) for step in (10, 20)]
    assert trace.largest_gradient.tolist() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must have at least 1 sweep, but is empty"),
        (sweep_line(1, [(64, ".")]) + "\n{", r"gradient_ranges.jsonl:2 is not a sweep .*JSONDecodeError"),
        ('{"step": 1}', r"gradient_ranges.jsonl:1 is not a sweep .*'batches'"),
        ("[1]", r"gradient_ranges.jsonl:1 is not a sweep"),
    ],
)
def test_a_file_that_is_no_record_of_sweeps_is_refused(tmp_path, content, message):
    file = tmp_path / "gradient_ranges.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        from_gradient_ranges(file)

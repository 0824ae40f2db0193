"""A recorded run becomes a trace with ceilings (largest scales without overflow) that are known, bounded or assumed."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_adaptive.lab.ceilings import from_gradient_ranges, trace_of
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.trace import Trace
from tests.shared import records
from tests.shared.records import gradient_line, unscaled_gradients


def run_of(scales, overflow, **values):
    return records.run_of(scales, [mark == "!" for mark in overflow], **values)


def exponents(ceiling):
    return np.log2(ceiling).round(6).tolist()


def test_interpolated_ceilings_lie_between_skipped_steps():
    # The run skips the steps at index 0 (scale 16) and 1 (scale 8), then applies scale 4. It skips index 6 at 16, then
    # applies 8.
    run = run_of([16, 8, 4, 4, 4, 4, 16, 8], "!!....!.")
    # Log2 of the ceiling is (3 + 2) / 2 = 2.5 at index 1 and (4 + 3) / 2 = 3.5 at index 6; linear in between, constant
    # outside.
    assert exponents(trace_of(run).ceiling) == [2.5, 2.5, 2.7, 2.9, 3.1, 3.3, 3.5, 3.5]


def test_interpolated_ceilings_are_moved_into_the_bounds():
    # The step at index 1 is skipped at a loss scale of 2^3, and index 2 is applied at 2^2. So log2 of the ceiling is
    # first assumed to be (3 + 2) / 2 = 2.5 at all three steps. But index 0 was applied at 2^3, so its log2 ceiling is
    # raised to 3.
    assert exponents(trace_of(run_of([8, 8, 4], ".!.")).ceiling) == [3, 2.5, 2.5]
    # The overflow is tolerated, so the next step has the same loss scale, 2^3. The log2 ceiling is then interpolated
    # between this scale and half of it: (3 + 2) / 2.
    assert exponents(trace_of(run_of([8, 8, 8], "!..")).ceiling) == [2.5, 3, 3]
    # No step follows the skipped step at the end. So its log2 ceiling is interpolated between its own loss scale, 2^3,
    # and half of this scale: (3 + 2) / 2.
    assert exponents(trace_of(run_of([4, 8], ".!")).ceiling) == [2.5, 2.5]


def test_largest_applied_scale_is_assumed_without_skips():
    run = run_of([4, 8, 4], "...")
    assert exponents(trace_of(run).ceiling) == [3, 3, 3]


def test_scale_of_zero_has_a_ceiling_below_every_float32():
    trace = trace_of(run_of([2.0**-148, 2.0**-149, 0, 0], "!!!!"))
    assert (trace.ceiling[2:] < 2.0**-149).all()


def test_bounds_come_from_steps_of_known_outcome_and_scale():
    known = [True] * 18 + [False, True]
    run = run_of([16.0] + [8.0] * 18 + [8.0], "!" + "." * 19, known=known)
    trace = trace_of(run)
    assert trace.lower_bound.tolist() == [0, *[8] * 17, 0, 8]
    assert trace.upper_bound.tolist() == [16, *[np.inf] * 19]
    assert trace.known([16, *[8] * 19]).tolist() == known


def test_a_run_of_which_too_little_is_known_is_refused():
    run = run_of([8.0] * 10, "." * 10, known=[False, False, *[True] * 8])
    with pytest.raises(ValueError, match=r"run states for 80% of its steps .*90%.*--log-interval 1"):
        trace_of(run)


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.booleans(), st.floats(0, 1e9) | st.just(np.nan)),
        min_size=1,
        max_size=60,
    )
)
def test_every_assumption_agrees_with_every_step(steps):
    exponent, overflow, gradients = zip(*steps, strict=True)
    flags = "".join("!" if over else "." for over in overflow)
    for largest in (np.array(gradients), None):
        run = run_of([2.0**k for k in exponent], flags, largest_gradient=largest)
        # A replay at the recorded loss scales must overflow at exactly the steps that the run skipped.
        assert ((run.used > trace_of(run).ceiling) == run.skipped).all()


def test_a_stretch_of_several_steps_bounds_each_of_them():
    # Four applied steps between 2^3 and 2^4, then two skipped steps down to 2^2.
    first, last = np.array([1, 5, 7]), np.array([4, 6, 8])
    count, scale = np.array([0, 2, 0]), np.array([16.0, 4.0, 4.0])
    unknown = np.full(3, np.nan)
    run = RecordedRun("run", (), "megatron", first, last, count, count, unknown, scale, start=8.0)
    assert [bounds.tolist() for bounds in run.scale_ranges] == [[8, 4, 4], [16, 16, 4]]
    assert (len(run), run.known_share, run.skipped_bounds, run.first_loss_scales) == (8, 1.0, (2, 2), (8.0, 8.0))
    trace = trace_of(run)
    assert trace.lower_bound.tolist() == [8, 8, 8, 8, 0, 0, 4, 4]
    assert trace.upper_bound.tolist() == [*[np.inf] * 4, 16, 16, np.inf, np.inf]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": {"loss": np.ones(3)}}, r"All arrays of the run 'run' must have one number for each step"),
        ({"columns": {"los": np.ones(2)}}, r"A column's name must be one of \('loss', .*, but got 'los'"),
        ({"last": np.array([2, 2])}, r"The steps of the run 'run' must increase"),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(run_of([8, 4], "!."), **changes)


def shown(exponents):
    """Return, for each ceiling (as log2), the largest gradient that FP16 can hold at this loss scale; NaN for None."""
    return np.array([np.nan if exponent is None else 65504.0 / 2.0**exponent for exponent in exponents])


def test_known_gradients_show_the_ceilings():
    run = run_of([4, 4, 4, 16, 4, 4], "...!..", largest_gradient=shown([5, None, 3, None, 4, 1]))
    # The steps at index 1 and 3 have no gradients, so log2 of their ceilings is interpolated: index 1 gets the mean of
    # 5 and 3, and index 3 the mean of 3 and 4. The gradients of the last step imply a log2 ceiling of 1, but this step
    # was applied at a loss scale of 2^2, so its log2 ceiling is at least 2.
    assert exponents(trace_of(run).ceiling) == [5, 4, 3, 3.5, 4, 2]


def test_gradients_above_an_overflow_are_lowered():
    # Both skipped steps have a loss scale of 2^4, but the gradients nearby imply ceilings of 2^7 and 2^8. So the
    # implied ceilings are lowered by 3.5 bits.
    gradients = shown([7, None, 7, 7, None, 8])
    trace = trace_of(run_of([8, 16, 8, 8, 16, 8], ".!..!.", largest_gradient=gradients))
    assert exponents(trace.ceiling) == [3.5, 3.5, 3.5, 3.5, 4, 4.5]
    # Three steps overflow at a loss scale of 2^4. After only one of these overflows, the gradients imply a ceiling
    # above 2^4 (2^9). The median over the three overflows ignores a single exception, so the ceilings from gradients
    # are not lowered.
    trace = run_of([8, 16, 8, 16, 8, 16, 8], ".!.!.!.", largest_gradient=shown([3.5, None] * 2 + [9, None, 3.5]))
    assert exponents(trace_of(trace).ceiling)[4] == 9


def test_the_trace_has_the_gradients_of_applied_steps_only():
    # An applied step cannot have a largest gradient of inf. So the trace must treat such a gradient as unknown.
    gradients = np.array([np.inf, 2.0, 0.0, np.nan, np.inf, 8.0])
    trace = trace_of(run_of([8, 4, 4, 4, 4, 4], "!....!", known=[True] * 6, largest_gradient=gradients))
    np.testing.assert_array_equal(trace.largest_gradient, [np.nan, 2.0, 0.0, np.nan, np.nan, np.nan])


@pytest.mark.parametrize("gradients", [None, np.full(2, np.nan), np.zeros(2), np.array([np.inf, 1e-300])])
def test_without_gradients_that_show_anything_all_is_as_before(gradients):
    run = run_of([8, 4], "!.", largest_gradient=gradients)
    assert trace_of(run).ceiling.tolist() == trace_of(run_of([8, 4], "!.")).ceiling.tolist()
    assert trace_of(run).largest_gradient is None


def test_an_exact_trace_knows_what_happens_at_every_scale():
    trace = Trace.exact("made", [8.0, 0.0, np.inf])
    assert len(trace) == 3
    for scale in (1.0, 8.0, np.nextafter(8.0, 9.0), 2.0**100):
        assert trace.known(scale).tolist() == [True, True, True]


def test_what_lies_between_the_bounds_is_assumed():
    trace = Trace("log", np.array([4.0]), np.array([2.0]), np.array([8.0]))
    assert [trace.known(scale).tolist() for scale in (1, 2, 3, 7, 8, 9)] == [[k] for k in (1, 1, 0, 0, 1, 1)]


@pytest.mark.parametrize(
    ("ceiling", "lower_bound", "upper_bound"),
    [([1.0], [2.0], [4.0]), ([4.0], [2.0], [4.0]), ([np.nan], [2.0], [4.0])],
    ids=["under", "over", "nan"],
)
def test_a_ceiling_outside_its_bounds_is_refused(ceiling, lower_bound, upper_bound):
    with pytest.raises(ValueError, match=rf"ceiling .*bounds, .* trace 'log' step 0 .* ceiling {ceiling[0]}, "):
        Trace("log", np.array(ceiling), np.array(lower_bound), np.array(upper_bound))


@pytest.mark.parametrize("ceiling", [[8.0], 8.0, "8", True])
def test_what_is_no_array_is_refused(ceiling):
    of_type = type(ceiling).__name__
    with pytest.raises(TypeError, match=rf"trace 'log' must be NumPy arrays, .* of type {of_type}\. .*numpy\.array"):
        Trace("log", ceiling, np.ones(1), np.ones(1))


@pytest.mark.parametrize("other", [{"upper_bound": np.full(3, 2.0)}, {"largest_gradient": np.ones(3)}])
def test_arrays_of_different_lengths_are_refused(other):
    with pytest.raises(ValueError, match=r"arrays .* trace 'log' must have .* shapes \[\(2,\), \(3,\)\]"):
        Trace("log", **{"ceiling": np.ones(2), "lower_bound": np.ones(2), "upper_bound": np.full(2, 2.0), **other})


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

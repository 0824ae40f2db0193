"""MindFormers' logs: the lines of its versions, sink mode, and the scale that is printed after the update."""

import numpy as np
import pytest

from mindformers_adaptive.lab.logs import read_log

LINE = (
    "2026-01-01 00:00:00,000 - mindformers/output/log[mindformers/core/callback/callback.py:747] - INFO - "
    "{{ Epoch:[  {epoch}/  2], step:[{step:5d}/{steps:5d}], loss: 4.155150, per_step_time: 250ms, lr: 0.001, "
    "overflow cond: {overflow}, loss_scale: {scale}, global_norm: [1.5], train_throughput_per_npu: 0.004T\n"
)


def read(tmp_path, *lines):
    (tmp_path / "worker_0.log").write_text("".join(lines), encoding="utf-8")
    return read_log(tmp_path / "worker_0.log")


def line(step, overflow, scale, epoch=1, steps=100):
    return LINE.format(step=step, overflow=overflow, scale=scale, epoch=epoch, steps=steps)


# One step's line in the form of each version, all saying: step 3, an overflow, 32768 afterwards.
VERSIONS = {
    "0.3 to 0.7": "[INFO] 2023-07-11 10:47:36,427 [/root/mindformers/core/callback/callback.py:269] print_output_info: "
    "Epoch:[  1/  1], step:[    3/  125], loss:[2.500/2.244], time:507.205 ms, lr:[0.], overflow cond: True, "
    "loss_scale: 32768.0\n",
    "0.6 without learning rate": "[INFO] 2023-07-11 10:47:36,427 print_output_info: Epoch:[  1/  1], "
    "step:[    3/  125], loss:[2.500/2.244], time:507.205 ms, overflow cond: True, loss_scale: 32768.0\n",
    "1.0 to 1.2": "2024-01-01 00:00:00,000 - mindformers[mindformers/core/callback/callback.py:318] - INFO - "
    "{ Epoch:[  1/  1], step:[    3/  125], loss:[2.500/2.244], per_step_time: 507ms, lr: 1e-05, "
    "overflow cond: True, loss_scale: 32768.0\n",
    "1.3, sink mode": "- INFO - { Epoch:[  1/  1], step:[    3/  125], loss: 2.500, per_step_time: 507ms, lr: 0.0, "
    "overflow cond: True, loss_scale: 32768.0, global_norm: [44.313248]\n",
    "arrays of one element": "- INFO - { Epoch:[  1/  1], step:[    3/  125], loss: 2.500, per_step_time: 507ms, "
    "lr: [1.e-05], overflow cond: [ True], loss_scale: [32768.], global_norm: [nan]\n",
    "1.7 to 2.0, separate losses": "- INFO - { Epoch:[  1/  1], step:[    3/  125], loss:[2.500000/2.244000], "
    "lm_loss: 2.400000, load_balancing_loss: 0.100000, per_step_time: 507ms, lr: 1e-05, overflow cond: True, "
    "loss_scale: 32768.0, global_norm: [inf], train_throughput_per_npu: 2.849T\n",
}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_line_of_each_version_is_read(tmp_path, version):
    run = read(tmp_path, VERSIONS[version])
    assert (run.log_format, run.step.tolist(), run.overflow[-1]) == ("mindformers", [1, 2, 3], True)
    assert (run.loss_scale[-1], run.loss[-1]) == (65536.0, 2.5)
    # Until 0.7 the time is that of the whole call.
    assert run.seconds is None if "507.205" in VERSIONS[version] else run.seconds[-1] == 0.507


def test_without_a_flag_a_falling_scale_tells_of_the_overflow(tmp_path):
    lines = [line(step, "X", 2.0**k).replace("overflow cond: X, ", "") for step, k in ((1, 16), (2, 16), (3, 15))]
    run = read(tmp_path, *lines)
    assert run.overflow.tolist() == [False, False, True]
    # That a step whose scale stayed was applied is not said.
    assert run.position_known.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("lines", "used"),
    [
        ([("True", 900.0), ("True", 300.0), ("True", 100.0)], [2700.0, 900.0, 300.0]),
        ([("False", 1024.0), ("False", 2048.0)], [1024.0, 1024.0]),
        # Eight printed digits are the float32 that they stand for.
        ([("True", "2147483600.0"), ("True", "[1.0737418e+09]")], [2.0**32, 2.0**31]),
    ],
)
def test_the_scale_of_the_first_step_is_inferred_with_the_factor_of_the_log(tmp_path, lines, used):
    run = read(tmp_path, *(line(step, *said) for step, said in enumerate(lines, start=1)))
    assert (run.loss_scale.tolist(), run.scale_factor) == (used, 3.0 if used[0] == 2700.0 else 2.0)


def test_steps_are_counted_over_epochs(tmp_path):
    lines = [line(step, "False", 1.0, epoch, steps=2) for epoch in (1, 2) for step in (1, 2)]
    assert read(tmp_path, *lines).step.tolist() == [1, 2, 3, 4]


def test_sink_mode_lines_stand_for_four_steps_each(tmp_path):
    # As in a published log of GLM-6B with a sink size of 4: 2^32, 2^28 and 2^24 after 0, 4 and 8 skips.
    lines = [line(4, "True", "268435460.0"), line(8, "True", "16777216.0"), line(12, "False", "8388608.0")]
    run = read(tmp_path, *lines)
    assert run.step.tolist() == list(range(1, 13))
    # The first line proves one skip, its own; the fall to the second proves four, and that to the third one.
    assert run.overflow.tolist() == [False] * 3 + [True] + [True] * 4 + [True] + [False] * 3
    assert run.loss_scale[4:8].tolist() == [2.0**k for k in (28, 27, 26, 25)]
    assert run.position_known.tolist() == [False] * 3 + [True] + [True] * 4 + [False] * 3 + [True]
    assert run.seconds.tolist() == [0.25] * 12
    assert np.isnan(run.loss).tolist() == [True, True, True, False] * 3


def test_a_raise_and_a_drop_between_two_lines_is_seen_by_its_flag(tmp_path):
    run = read(tmp_path, *(line(4 * k, k == 3, 1024.0) for k in (1, 2, 3)))
    assert run.overflow.tolist() == [False] * 11 + [True]
    assert (run.loss_scale[-1], run.loss_scale[-2]) == (2048.0, 1024.0)
    assert run.position_known.tolist() == [False, False, False, True] * 3


def test_missing_steps_are_left_out_and_named(tmp_path):
    run = read(tmp_path, *(line(step, "False", 1024.0) for step in (1, 2, 3, 7, 8)))
    assert run.step.tolist() == [1, 2, 3, 7, 8]
    assert [note for note in run.notes if "log:4: 3 step(s) before this line, 4 to 6, are not in the log" in note]


def test_lines_of_other_monitors_and_progress_bars_are_ignored_and_no_problems(tmp_path):
    other = "- INFO - Epoch:[  1/  2], step:[    1/  100] local_norm: 0.5000\n"
    bar = "- INFO -    0.0% |      | 0.00600 samples/s/p  25 days, 2:07:47 }\n"
    run = read(tmp_path, line(1, "False", 1024.0), bar, other)
    assert (run.lines_used, run.lines_ignored, run.problems) == (1, 2, ())


@pytest.mark.parametrize("shortened", ["[1", "1."])
def test_a_norm_that_a_cut_may_have_shortened_is_not_used(tmp_path, shortened):
    cut = line(2, False, 8.0).partition("[1.5]")[0] + shortened
    run = read(tmp_path, line(1, False, 8.0), cut)
    np.testing.assert_array_equal(run.gradient_norm, [1.5, np.nan])


@pytest.mark.parametrize(("printed", "norm"), [("[1.5]", 1.5), ("1.5", 1.5), ("[nan]", np.nan), ("None", np.nan)])
def test_the_norm_of_the_gradients_is_read(tmp_path, printed, norm):
    run = read(tmp_path, line(1, "False", 1024.0), line(2, "False", 1024.0).replace("[1.5]", printed))
    np.testing.assert_array_equal(run.gradient_norm, [1.5, norm])


def test_a_loss_that_is_nan_is_known_to_be_so(tmp_path):
    run = read(tmp_path, line(1, "False", 1024.0), line(2, "True", 512.0).replace("4.155150", "nan"))
    assert np.isinf(run.loss).tolist() == [False, True]


def test_a_trainer_that_prints_no_scale_is_refused(tmp_path):
    pynative = (
        "- INFO - { step:[    1/  100], consumed_samples: 8, global_batch_size: 8, loss:   4.155150, "
        "per_step_time:    103ms, lr: 1.000000e-03, grad_norm:   1.500000, throughput:   0.10T }\n"
    )
    fixed = line(1, "False", "unavailable")
    for text in (pynative, fixed):
        with pytest.raises(ValueError, match=r"must show what loss scale .*, but the 1 line of steps in .*worker_0"):
            read(tmp_path, text)


def test_a_scale_that_jumps_is_noted_and_inferred(tmp_path):
    run = read(tmp_path, line(1, "False", 1024.0), line(2, "False", 64.0))
    assert run.loss_scale.tolist() == [1024.0, 64.0]
    assert [note for note in run.notes if "log:2: the scale 64 does not follow from 1024" in note]

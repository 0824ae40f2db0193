"""A run gets only advice that surely helps: start at a loss scale that held, use larger windows, or find the cause."""

import dataclasses
import json
import re

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.lab.measures import cost, measure
from mindformers_adaptive.lab.policies import make_policy
from mindformers_adaptive.lab.replay import replay
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.trace import Trace
from tests.conftest import ROOT
from tests.shared.records import record_of, run_of

LOGS = ROOT / "tests" / "record" / "samples"


def recorded(ceilings, name="dynamic", **params):
    """Return the run of a policy on a trace with given ceilings, the largest loss scales without overflow."""
    result = replay(make_policy(name, **params), Trace.exact("made", ceilings))
    return run_of(result.loss_scale, result.overflow, final_loss_scale=result.final_state["loss_scale"])


def rules(run):
    return [advice.rule for advice in analyze(run).advice]


def demo_run():
    """Return a run like the demo training: 16 skipped steps at the start, 7 more after windows of 20 to 40 steps."""
    skipped = [*range(1, 16), 18, 94, 127, 137, 223, 284, 328, 399]
    policy, scales = make_policy("adaptive", loss_scale_value=2.0**32), [2.0**32]
    for step in range(1, 401):
        scales.append(policy.step(step in skipped))
    return record_of(scales, skipped)


KINDS = {
    "noise": lambda random, steps: random.choice([0, 0.1, 1.0]) * random.standard_normal(steps),
    "walk": lambda random, steps: np.cumsum(0.1 * random.standard_normal(steps)),
    "step": lambda random, steps: random.uniform(-8, 8) * (np.arange(steps) > random.integers(steps)),
    "spikes": lambda random, steps: -random.uniform(1, 8) * (random.random(steps) < 0.02),
    "trend": lambda random, steps: np.linspace(0, random.uniform(-8, 8), steps),
}
POLICIES = {
    "dynamic": ("init_loss_scale", {"scale_window": [5, 20, 50, 200]}),
    "adaptive": ("loss_scale_value", {"min_scale_window": [5, 20], "hysteresis": [1, 2]}),
    "megatron": ("initial_scale", {"growth_interval": [50, 300]}),
    "torch": ("init_scale", {"growth_interval": [100]}),
    "fixed": ("loss_scale", {}),
}


def random_run(seed):
    """Return a run of a random policy on random ceilings; for some runs, it is unknown which steps overflowed."""
    random = np.random.default_rng(seed)
    steps, name = int(random.choice([60, 300, 1000])), str(random.choice([*POLICIES]))
    exponents = random.uniform(4, 24) + KINDS[str(random.choice([*KINDS]))](random, steps)
    start, tried = POLICIES[name]
    params = {key: random.choice(values).item() for key, values in tried.items()}
    run = recorded(np.exp2(exponents), name, **{start: 2.0 ** int(random.integers(0, 33))}, **params)
    known = random.random(steps) < random.choice([1.0, 1.0, 0.95, 0.5])
    return dataclasses.replace(run, position_known=known)


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_advice_never_costs_more_than_the_run(seed):
    run = random_run(seed)
    analysis = analyze(run)
    for advice in analysis.advice:
        scale, before = advice.figures.get("scale"), np.arange(len(run)) < advice.figures.get("reached_at", 1) - 1
        assert advice.rule != "start lower" or not (run.overflow & before & (run.loss_scale <= scale)).any()
        assert advice.rule != "start lower" or scale < run.loss_scale[0]
    values = analysis.to_dict()
    if values["scale_sense"] is None:
        return
    section = yaml.safe_load(values["scale_sense"])["scale_sense"]
    assert section.pop("type") == "AdaptiveLossScale"
    used = np.append(run.loss_scale, run.loss_scale[-1])
    for trace in map(run.to_trace, run.assumptions):
        advised = replay(make_policy("adaptive", **section), trace).measures
        assert cost(advised) < cost(measure(trace, used))
        assert advised.known_share >= 0.9
    # The YAML settings to paste agree with the table and with the advice.
    assert values["certainty"]["known_share"] == values["outcomes"][-1]["known_share"] >= 0.9
    starts = [advice.figures["scale"] for advice in analysis.advice if advice.rule == "start lower"]
    assert section["loss_scale_value"] == (starts or [run.loss_scale[0]])[0]


def test_start_is_lowered_to_the_highest_scale_that_held():
    analysis = analyze(recorded([2.0**16] * 2000, init_loss_scale=2.0**32))
    [advice] = analysis.advice
    assert (advice.rule, advice.figures["scale"], advice.figures["saves_skipped_steps"]) == ("start lower", 65536, 16)
    assert advice.change == "Start at 2^16 (loss_scale_value: 65536) instead of 2^32."
    assert "  loss_scale_value: 65536  # was 2^32" in analysis.scale_sense
    rows = {row["policy"]: row for row in analysis.outcomes}
    assert (rows["as recorded"]["skipped"], rows["as advised"]["skipped"]) == (16, 0)


def test_a_start_is_a_power_of_two_that_held():
    run = run_of(65535.0 / 2.0 ** np.minimum(np.arange(200), 4), np.arange(200) < 4)
    assert analyze(run).advice[0].figures["scale"] == 2048


@pytest.mark.parametrize(
    ("ceilings", "start", "window", "expected"),
    [
        # An initial loss scale that costs only two skipped steps gets no advice.
        ([2.0**16] * 500, 2.0**18, 2000, []),
        ([2.0**16] * 500, 2.0**19, 2000, ["start lower"]),
        # The log does not show whether a higher initial loss scale or smaller windows would help, so there is no
        # advice.
        ([2.0**20] * 1400, 2.0**8, 100, []),
        ([2.0**16] * 50 + [2.0**4] * 20 + [2.0**16] * 1200, 2.0**16, 100, []),
        # Only two raises of the loss scale lead to overflows. These are too few for advice.
        ([2.0**16] * 1900, 2.0**16, 900, []),
        # With a window of 20, the loss scale follows the rising ceiling for 2000 steps. Only the last raises of the
        # loss scale lead to overflows.
        (np.exp2(10.5 + np.minimum(np.arange(2100), 2000) / 25), 2.0**10, 20, []),
        ([2.0**16] * 3000, 2.0**16, 50, ["larger window"]),
        ([2.0**16] * 3000, 2.0**32, 50, ["start lower", "larger window"]),
    ],
)
def test_what_costs_little_or_is_unknown_is_left_alone(ceilings, start, window, expected):
    assert rules(recorded(ceilings, init_loss_scale=start, scale_window=window)) == expected


def test_window_after_which_every_raise_fails_is_too_small():
    analysis = analyze(recorded([2.0**16] * 3000, init_loss_scale=2.0**16, scale_window=50))
    [advice] = analysis.advice
    assert (advice.figures["largest_window"], advice.figures["skipped"]) == (50, 58)
    assert advice.figures["skipped_instead"] == analysis.outcomes[-1]["skipped"] < 20
    assert analysis.settings.rule.min_scale_window > 50


def test_windows_are_not_judged_where_positions_are_inferred():
    run = recorded([2.0**16] * 3000, init_loss_scale=2.0**16, scale_window=50)
    inferred = run_of(run.loss_scale, run.overflow, known=False)
    assert analyze(inferred).advice == ()
    assert analyze(inferred).to_dict()["skipped"]["inferred"] == run.skipped_steps > 50


def test_start_of_a_log_that_begins_later_may_be_a_resumed_one():
    run = run_of(2.0 ** np.maximum(32 - np.arange(200), 16), np.arange(200) < 16, first_step=501)
    assert "begins at step 501" in analyze(run).advice[0].reason


def test_a_scale_that_held_for_less_than_a_window_is_no_start():
    assert rules(run_of([2.0**32, 2.0**31, 2.0**30] + [2.0**29] * 19, [1] * 3 + [0] * 19)) == []
    assert "Too few steps to judge" in analyze(run_of([8, 4, 2, 1, 1], [1, 1, 1, 0, 0])).text()


def test_a_scale_is_no_start_where_its_steps_are_inferred(tmp_path):
    log, step = tmp_path / "train.log", "[log_dist] [Rank 0] step={}, skipped={}, lr=[0.1], mom=[(0.9, 0.95)]\n"
    overflow = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, reducing to {}\n"
    lines = [overflow.format(65536, 32768), step.format(1, 1), overflow.format(1, 1), step.format(2500, 1586)]
    log.write_text("".join(lines))
    analysis = analyze(read_log(log))
    assert analysis.to_dict()["skipped"]["count"] == 1586
    assert (analysis.advice, analysis.settings) == ((), None)


def test_a_scale_held_where_few_of_many_steps_are_inferred(tmp_path):
    """Among 100 steps with 1 skipped step, 20 or more steps in a row have no overflow, wherever the skipped step is."""
    log = tmp_path / "train.log"
    line = "iteration {:8d}/ 1000 | loss scale: {:.1f} | number of skipped iterations: {:3d} |\n"
    lines = [line.format(100, 2.0**17, 15), line.format(200, 2.0**17, 0), line.format(300, 2.0**16, 1)]
    log.write_text("".join(lines))
    (start,) = analyze(read_log(log)).advice
    assert (start.rule, start.figures["scale"]) == ("start lower", 2.0**17)


def test_room_is_named_without_a_setting():
    climbed = analyze(recorded([2.0**20] * 4000, init_loss_scale=2.0**12, scale_window=200))
    assert re.search(r"room at the start: [^.]* 2\^12 to 2\^2", climbed.text())
    scale, norms = np.full(40, 64.0), np.linspace(0.25, 1.0, 40)
    for gradients, room in (({"gradient_norm": norms}, 9), ({"largest_gradient": norms / 256}, 17), ({}, 0)):
        analysis = analyze(run_of(scale, np.full(40, False), **gradients))
        assert (analysis.advice, analysis.settings) == ((), None)
        assert (f"there is room for {room} bits more" in " ".join(analysis.text().split())) == bool(room)


def test_overflows_at_the_floor_lead_to_the_model():
    analysis = analyze(recorded([2.0**16] * 100 + [0.0] * 40, init_loss_scale=2.0**16))
    [advice] = analysis.advice
    assert advice.rule == "collapse"
    assert advice.figures == {"steps": 40, "first_step": 101, "last_step": 140}
    assert "falls no further" in advice.change
    assert "adaptive-loss-scale why" in advice.change
    assert analysis.to_dict()["scale_sense"] is None


def test_a_scale_that_is_held_above_1_is_to_fall_first():
    [advice] = analyze(run_of([2.0**38] * 60, [True] * 60)).advice
    assert (advice.rule, advice.change.partition(",")[0]) == ("collapse", "The loss scale stays where it is")


@pytest.mark.parametrize(("steps", "factor", "is_one"), [(10, 1, True), (9, 1, False), (50, 2, True), (49, 2, False)])
def test_a_collapse_is_10_overflows_at_one_scale_or_50(steps, factor, is_one):
    scale = [2.0**60] * 20 + [2.0**60 / factor**step for step in range(steps)]
    assert ("collapse" in rules(run_of(scale, [False] * 20 + [True] * steps))) is is_one


def test_a_steep_fall_that_ends_is_no_collapse():
    assert "collapse" not in rules(recorded([2.0**16] * 100 + [2.0**-10] * 100, "torch"))
    assert rules(run_of(2.0 ** np.maximum(-np.arange(200.0), -140), np.arange(200) < 140)) == ["collapse"]


def test_where_the_loss_is_nan_nothing_else_is_advised():
    start = 2.0 ** np.maximum(32 - np.arange(200), 16)
    loss = np.where(np.arange(200) >= 150, np.inf, 2.0)
    for run in (run_of(start, np.arange(200) < 16, loss=loss), run_of([1.0] * 200, [False] * 200, loss=loss)):
        analysis = analyze(run)
        [advice] = analysis.advice
        assert (advice.rule, advice.figures) == ("loss jump", {"first_step": 151})
        assert "inf or NaN from step 151 on" in advice.reason
        assert "adaptive-loss-scale why" in advice.change
        assert analysis.settings is None


def test_a_run_at_a_scale_of_1_may_be_one_in_bf16():
    norms = np.full(40, 2.0**-8)
    analysis = analyze(run_of([1.0] * 40, [False] * 40, gradient_norm=norms))
    assert ([advice.rule for advice in analysis.advice], analysis.settings) == (["scale of 1"], None)
    assert "BF16?" in analysis.text()
    assert rules(run_of([1.0] * 20 + [2.0] * 20, [False] * 40)) == []


def test_overflows_at_a_scale_of_1_lead_to_the_layer(tmp_path):
    """DeepSpeed prints this log line for an overflow at the smallest loss scale. The line has no step number."""
    line = "[stage2.py:1628:step] [deepscale] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1"
    log = tmp_path / "deepspeed.log"
    for overflows, rule in ((9, "scale of 1"), (22, "collapse")):
        log.write_text(f"{line}\n" * overflows)
        [advice] = analyze(read_log(log)).advice
        assert advice.rule == rule
    assert re.search(r"At least 22 steps overflowed .*scale of 1\.", advice.reason)
    assert "adaptive-loss-scale why" in advice.change


@pytest.mark.parametrize(
    ("norms", "first_step", "reason"),
    [(["0.752", "0.741", "nan"], 3, "not skipped"), (["nan"] * 3, 1, "not skipped"), (["inf"] * 3, 1, "not skipped")],
)
def test_nan_gradients_at_a_scale_of_1_lead_to_the_layer(tmp_path, norms, first_step, reason):
    """Megatron-LM prints such a log for a BF16 run: the run skips no steps, and the log does not show a loss of NaN."""
    lines = [
        f" iteration {step:8}/ 8000 | elapsed time per iteration (ms): 7613.1 | learning rate: 6.680E-06 | loss scale: "
        f"1.0 | grad norm: {norm} | number of skipped iterations:   0 | number of nan iterations:   0 |"
        for step, norm in enumerate(norms, start=1)
    ]
    log = tmp_path / "megatron.log"
    log.write_text("\n".join(lines))
    analysis = analyze(read_log(log))
    [advice] = analysis.advice
    bad = len(norms) - norms.index(norms[-1])
    assert (advice.rule, advice.figures) == ("bad gradients", {"steps": bad, "first_step": first_step})
    assert reason in advice.change
    assert "adaptive-loss-scale why" in advice.change
    assert "BF16?" not in analysis.text()


def test_a_nan_norm_of_an_applied_step_leads_to_the_layer():
    norms = np.where(np.arange(200) < 150, 1.0, np.inf)
    assert rules(run_of([2.0**16] * 200, [False] * 200, gradient_norm=norms)) == ["bad gradients"]
    assert (
        rules(run_of([2.0**16] * 200, np.arange(200) >= 195, gradient_norm=np.where(np.arange(200) < 195, 1.0, np.inf)))
        == []
    )
    dropped = np.arange(200) >= 150
    assert rules(run_of([2.0**16] * 200, [False] * 200, gradient_norm=norms, dropped_by_norm=dropped)) == []
    # A log of Megatron-DeepSpeed does not show which steps were skipped.
    [advice] = analyze(run_of([1.0] * 9, [False] * 9, known=False, gradient_norm=np.full(9, np.inf))).advice
    assert (advice.rule, "no loss scale can help" in advice.change) == ("bad gradients", True)


def test_adaptive_settings_are_not_for_a_guided_run():
    run = run_of([2.0**32] * 5 + [2.0**16] * 95, [1] * 5 + [0] * 95)
    gradients = np.append(np.full(5, np.inf), np.full(95, 65504 / 2.0**16.5))
    analysis = analyze(dataclasses.replace(run, columns={"largest_gradient": gradients}))
    assert analysis.advice[0].figures["scale"] == 2.0**16
    assert (analyze(run).settings is None, analysis.settings) == (False, None)


def test_a_run_without_trouble_has_nothing_to_change():
    analysis = analyze(recorded([2.0**16] * 900, init_loss_scale=2.0**16, scale_window=1000))
    assert (analysis.advice, analysis.settings) == ((), None)
    assert "nothing that should be changed" in analysis.text()
    assert "scale stayed at 2^16." in analysis.text()
    assert "scale did not change" in analysis.text(details=True)


@pytest.mark.parametrize(
    ("name", "scale", "known", "inferred"),
    [
        ("mindformers_1_9_cpu.log", None, 11, 0),
        ("megatron_gpt2_n4.log", 2.0**14, 10, 9),
        ("deepspeed_overflow.log", None, 0, 6),
    ],
)
def test_sample_logs_start_where_a_scale_held(name, scale, known, inferred):
    analysis = analyze(read_log(LOGS / name))
    assert [advice.figures["scale"] for advice in analysis.advice] == ([] if scale is None else [scale])
    values = json.loads(json.dumps(analysis.to_dict(), allow_nan=False))
    assert (values["skipped"]["known"], values["skipped"]["inferred"]) == (known, inferred)
    assert values["outcomes"][0]["skipped"] == known + inferred


def short_run(steps, window, first_step=1, scales=None, **columns):
    scales = [65536.0] * steps if scales is None else scales
    windows = None if window is None else np.full(steps, float(window))
    return run_of(scales, [False] * steps, first_step=first_step, scale_window=windows, **columns)


def test_a_run_shorter_than_its_window_needs_a_start():
    [advice] = analyze(short_run(25, 1000)).advice
    assert (advice.rule, advice.figures) == ("short run", {"steps": 25, "window": 1000})
    assert "adaptive-loss-scale find" in advice.change
    assert re.search(r"\(25 steps\) .*shorter .*window \(1000 steps\)", advice.reason)


@pytest.mark.parametrize(
    "run",
    [
        short_run(25, 25),
        short_run(25, None),
        short_run(25, 1000, first_step=2),
        short_run(25, 1000, scales=[65536.0] * 20 + [131072.0] * 5),
        short_run(25, 1000, largest_gradient=np.full(25, 1.0)),
    ],
)
def test_a_run_that_can_rise_or_rose_is_not_short(run):
    assert rules(run) == []


@pytest.mark.parametrize("command", ["analyze", "compare", "tune"])
def test_the_demo_is_answered_in_15_lines(tmp_path, run_program, command):
    # The launcher leaves the configuration beside the record.
    (tmp_path / "loss_scale_config.yaml").touch()
    (tmp_path / "demo.jsonl").write_text("".join(json.dumps(line) + "\n" for line in demo_run()))
    code, printed, errors = run_program(command, tmp_path / "demo.jsonl")
    assert (code, errors) == (0, "")
    assert len(printed.splitlines()) <= 15
    if command == "analyze":
        assert re.match(r"23 of 400 steps .*skipped \(5\.8%\): 16 .*start, .* 2\^32 .* 7 ", printed)
        assert "loss_scale_value: 65536  # was 2^32" in printed
        assert "windows of 20 to 40 steps cost 7 skipped steps" in printed
    details = run_program(command, tmp_path / "demo.jsonl", "--details")[1]
    assert len(details.splitlines()) > 15
    headers = [line for line in details.splitlines() if line.startswith(("rule  ", "setting  "))]
    assert headers
    assert all(2 <= len(header.split("  ")) - header.split("  ").count("") <= 6 for header in headers)

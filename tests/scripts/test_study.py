"""The study of rules takes its numbers from the lab, states verdicts that follow from them, and is reproducible."""

import dataclasses
import math

import numpy as np
import pytest

from mindformers_adaptive.lab.replay import replay
from mindformers_adaptive.lab.running_rule import start_rule
from mindformers_adaptive.rules.formats import FORMATS
from scripts.studies import study
from scripts.studies.own_ceilings import INDEPENDENT_CEILINGS, independent_ceiling
from scripts.studies.synthetic import KINDS, REGIMES, synthetic_trace, with_gradients
from tests.shared.pages import figure

pytestmark = pytest.mark.slow


def rows_of(printed, heading):
    """Return the rows of the table below a heading, as lists of table cells."""
    lines = printed[printed.index(heading) :].split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


def test_study_prints_the_figures_of_direct_calls(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "study.svg"
    monkeypatch.setattr("sys.argv", ["study.py", "--steps", "300", "--seeds", "2", "--picture", str(picture)])
    runs = []
    for _ in range(2):
        study.main()
        runs.append((capsys.readouterr().out, picture.read_bytes()))
    assert runs[0] == runs[1]
    printed = runs[0][0]
    assert "8 kinds, 2 seeds (0 to 1) of 300 steps each" in printed

    row = {row[0]: row for row in rows_of(printed, "All from the initial scale 2^16")}["spikes"]
    traces = [synthetic_trace("spikes", 300, seed) for seed in (0, 1)]
    for column, name, params in [
        (1, "adaptive", {"loss_scale_value": 65536}),
        (3, "dynamic", {"init_loss_scale": 65536, "scale_window": 100}),
        (6, "megatron", {"initial_scale": 65536}),
        (7, "torch", {"init_scale": 65536}),
    ]:
        measures = [replay(start_rule(name, **params), trace).measures for trace in traces]
        skipped = np.mean([measured.skipped for measured in measures]) / 0.3
        assert row[column] == f"{skipped:.1f} / {np.mean([measured.headroom_lost for measured in measures]):.2f}"


# The tests of this file repeat the study's replays only on these kinds of traces, because all kinds would take too
# long.
REPEATED = ("spikes", "alternating regimes")


def test_figures_of_the_page_are_those_of_the_present_rules():
    data = figure("study")
    steps, seeds = data["steps"], data["seeds"]
    assert (steps, seeds, list(data["same"][study.ADAPTIVE])) == (10_000, 5, [*KINDS, study.MEAN])
    traces = {key: each for key, each in study.traces_by_place(steps, seeds).items() if key[1] in REPEATED}
    repeated = study.study(study.GUIDED_AND_FIXED | study.POLICIES, traces)
    published = [(data["same"], repeated[study.EXACT])]
    published += [(data["guided"][group], by_policy) for group, by_policy in repeated.items()]
    for expected, by_policy in published:
        for policy, on_kinds in expected.items():
            for kind in REPEATED & on_kinds.keys():
                assert by_policy[policy][kind] == pytest.approx(on_kinds[kind]), (policy, kind)


def test_page_says_what_its_data_say():
    data = figure("study")
    mean = {policy: row[study.MEAN] for policy, row in data["same"].items()}
    assert all(mean["dynamic 100"][name] < mean[study.ADAPTIVE][name] for name in ("skipped", "headroom_lost"))
    shown = study.tables(data)
    assert len(shown["guided"]) == 1 + 2 * len(data["guided"])


def test_most_adaptive_skips_are_raises_below_a_window_of_500():
    for kind in KINDS:
        run = replay(start_rule("adaptive"), synthetic_trace(kind, 5000, seed=0))
        skipped = np.flatnonzero(run.overflow)
        changes = np.flatnonzero(np.diff(run.loss_scale)) + 1
        raised = np.diff(run.loss_scale)[changes - 1] > 0
        last = np.searchsorted(changes, skipped, side="right") - 1
        failed = (last >= 0) & raised[last] & (skipped - changes[last] < run.scale_window[skipped])
        assert failed.mean() > 0.5, kind
        assert (run.scale_window[skipped] < 500).mean() > 0.5, kind


@pytest.fixture(scope="module")
def guided():
    return study.study(study.GUIDED_AND_FIXED, study.traces_by_place(steps=600, seeds=2))


def test_figures_of_the_guided_study_are_those_of_direct_calls(guided):
    traces = [with_gradients(synthetic_trace("spikes", 600, seed), 3.0, 0.4, seed) for seed in (0, 1)]
    runs = [replay(start_rule("guided"), trace) for trace in traces]
    row = guided["hidden by 3 bits"][study.GUIDED]["spikes"]
    assert row["skipped"] == pytest.approx(np.mean([run.measures.skipped for run in runs]) / 0.6)
    assert row["headroom_lost"] == pytest.approx(np.mean([run.measures.headroom_lost for run in runs]))
    below = [np.log2(trace.ceiling / run.loss_scale)[~run.overflow] for run, trace in zip(runs, traces, strict=True)]
    assert row["far_below"] == pytest.approx(np.mean([np.mean(bits > 16) for bits in below]))


def test_tables_compare_the_guided_rule_with_a_window_of_1000(guided):
    shown = study.guided_table(guided)
    [row] = [row for row in shown if row[:2] == ["hidden by 3 bits", study.GUIDED]]
    mean = guided["hidden by 3 bits"][study.GUIDED][study.MEAN]
    assert row[2:4] == [f"{mean['skipped']:.2f}", f"{mean['headroom_lost']:.1f}"]
    for group, kind, *skipped in study.worse_table(guided)[1:]:
        of_guided, of_dynamic = (guided[group][policy][kind]["skipped"] for policy in (study.GUIDED, study.DYNAMIC))
        assert (of_guided > of_dynamic, skipped) == (True, [f"{of_guided:.2f}", f"{of_dynamic:.2f}"])


def test_far_below_counts_applied_steps_beyond_16_bits():
    trace = synthetic_trace("stationary", 4, seed=0)
    scales = trace.ceiling / 2.0 ** np.array([16.0, 17.0, 20.0, -1.0])
    row = study.figures_of(trace, scales, np.array([False, False, False, True]))
    assert (row["skipped"], row["far_below"]) == (250.0, pytest.approx(2 / 3))
    assert row["headroom_lost"] == pytest.approx(53 / 3)


def in_format(trace, number_format):
    """Return a copy of a trace. Its largest gradients, times the ceiling, are rounded to an 8-bit format."""
    top = math.frexp(number_format.largest)[1] - 1
    # A value up to half a quantum (distance between neighboring numbers) above the format's largest number is rounded
    # down to the largest number.
    middle = number_format.largest + number_format.quantum(top) / 2
    mantissa, exponent = np.frexp(trace.largest_gradient * middle / number_format.largest * (1 - 1e-9))
    quantum = number_format.quantum(top) / 2.0 ** (top + 1)
    return dataclasses.replace(trace, largest_gradient=np.ldexp(np.round(mantissa / quantum) * quantum, exponent))


@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fn", "hifloat8"])
def test_guided_rule_skips_no_more_with_8_bit_gradients(guided_in_float16, name):
    number_format = FORMATS[name]
    traces = {
        key: [in_format(with_gradients(trace, gradient_format=number_format), number_format) for trace in each]
        for key, each in guided_in_float16[1].items()
    }
    [rows] = study.study({study.GUIDED: start_rule("guided", gradient_format=name)}, traces).values()
    usual = guided_in_float16[0][study.EXACT]
    skipped = rows[study.GUIDED][study.MEAN]["skipped"]
    assert skipped <= usual[study.GUIDED][study.MEAN]["skipped"] + 1.0
    assert skipped < usual[study.DYNAMIC][study.MEAN]["skipped"]


@pytest.fixture(scope="module")
def guided_in_float16():
    """Return the results of the guided rule and of fixed windows on a few traces; also return these traces."""
    traces = {(study.EXACT, kind): [synthetic_trace(kind, 1000, seed) for seed in (0, 1)] for kind in REPEATED}
    shown = {key: [with_gradients(trace) for trace in each] for key, each in traces.items()}
    return study.study(study.GUIDED_AND_FIXED, shown), traces


def test_skips_of_an_entry_are_in_the_fall_and_20_steps():
    levels = np.array([9.0] * 5 + [6.0, 3.0] + [3.0] * 30 + [9.0] * 3 + [5.0])
    overflow = np.zeros(len(levels), bool)
    overflow[[4, 5, 6, 25, 26, 40]] = True
    assert study.entry_skips(levels, overflow).tolist() == [3, 1]
    assert study.entry_skips(np.array([3.0, 9.0]), np.full(2, True)).tolist() == []


@pytest.mark.parametrize(("level", "offset", "spread", "memory"), INDEPENDENT_CEILINGS)
def test_a_ceiling_of_its_own_is_not_what_the_gradients_show(level, offset, spread, memory):
    trace = independent_ceiling(20_000, 0, level, offset, spread, memory)
    ceiling = np.log2(trace.ceiling)
    beyond = np.log2(65504 / trace.largest_gradient) - ceiling
    assert (ceiling.mean(), ceiling.std()) == (pytest.approx(level, abs=0.01), pytest.approx(0.05, abs=0.005))
    assert (beyond.mean(), beyond.std()) == (pytest.approx(offset, abs=0.15), pytest.approx(spread, abs=0.1))
    shown = beyond + ceiling
    assert np.corrcoef(shown[1:], shown[:-1])[0, 1] == pytest.approx(memory, abs=0.03)
    assert np.corrcoef(shown, ceiling)[0, 1] == pytest.approx(0, abs=0.05)


def test_regimes_are_left_and_entered_as_one_replay_does():
    trace = synthetic_trace("one-off regime", 1500, seed=0)
    scales, overflows = study.scales_on(start_rule("guided"), [trace])
    replayed = replay(start_rule("guided"), trace)
    np.testing.assert_array_equal(scales[0], replayed.loss_scale)
    np.testing.assert_array_equal(overflows[0], replayed.overflow)
    regimes = study.regime_study(1500, seeds=1)
    assert list(regimes) == list(study.CHANGES)
    assert all(list(rows) == list(regimes["at once"]) for rows in regimes.values())
    assert set().union(*study.CHANGES.values()) == {kind for kind in REGIMES if "spikes" not in kind}
    assert study.regime_table({"at once": {"one": [1.25, 2]}})[1] == ["at once", "one", "1.2", "2"]


def test_guided_rule_skips_less_than_a_window_of_1000():
    data = figure("study")
    for group, by_policy in data["guided"].items():
        guided, dynamic = (by_policy[policy][study.MEAN] for policy in (study.GUIDED, study.DYNAMIC))
        assert guided["skipped"] < dynamic["skipped"], group
        assert guided["far_below"] < 0.08, group
    assert all(by_policy[study.GUIDED][1] <= 2 for by_policy in data["regimes"].values())
    for by_policy in (data["same"], *data["guided"].values()):
        assert all(row[study.MEAN]["headroom_lost"] < study.FREE_BITS for row in by_policy.values())

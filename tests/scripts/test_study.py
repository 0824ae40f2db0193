"""The study of rules takes its numbers from the lab, states verdicts that follow from them, and is reproducible."""

import numpy as np
import pytest

from mindformers_adaptive.lab.measures import FREE_BITS
from mindformers_adaptive.lab.replay import replay
from mindformers_adaptive.lab.running_rule import start_rule
from scripts.studies import study
from scripts.studies.synthetic import KINDS, REGIMES, synthetic_trace
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


def test_figures_of_the_page_are_those_of_the_present_rules(monkeypatch):
    data = figure("study")
    steps, seeds = data["steps"], data["seeds"]
    assert (steps, seeds, list(data["same"][study.ADAPTIVE])) == (10_000, 5, [*KINDS, study.MEAN])
    # Repeat one kind of trace, and one kind of regime for the guided rule: all of them would take too long.
    traces = {"spikes": [synthetic_trace("spikes", steps, seed) for seed in range(seeds)]}
    for policy, on_kinds in study.study(study.POLICIES, traces).items():
        assert on_kinds["spikes"] == pytest.approx(data["same"][policy]["spikes"]), policy
    monkeypatch.setattr(study, "CHANGES", {"over 20 steps": study.SLOWLY})
    monkeypatch.setattr(study, "GUIDED_AND_FIXED", {"guided": start_rule("guided")})
    assert study.regime_study(steps, seeds)["over 20 steps"]["guided"] == data["regimes"]["over 20 steps"]["guided"]


def test_page_says_what_its_data_say():
    data = figure("study")
    mean = {policy: row[study.MEAN] for policy, row in data["same"].items()}
    assert all(mean["dynamic 100"][name] < mean[study.ADAPTIVE][name] for name in ("skipped", "headroom_lost"))
    assert all(row["headroom_lost"] < FREE_BITS for row in mean.values())
    assert all(by_policy["guided"][1] <= 2 for by_policy in data["regimes"].values())


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


def test_skips_of_an_entry_are_in_the_fall_and_20_steps():
    levels = np.array([9.0] * 5 + [6.0, 3.0] + [3.0] * 30 + [9.0] * 3 + [5.0])
    overflow = np.zeros(len(levels), bool)
    overflow[[4, 5, 6, 25, 26, 40]] = True
    assert study.entry_skips(levels, overflow).tolist() == [3, 1]
    assert study.entry_skips(np.array([3.0, 9.0]), np.full(2, True)).tolist() == []


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

"""The study of policies: its figures are those of the lab, its verdicts follow from them, and it repeats itself."""

import numpy as np
import pytest
import study
from conftest import ROOT
from pages import ENGLISH_DOCS, tables

from mindformers_adaptive.lab.logs import read_log
from mindformers_adaptive.lab.policies import make_policy
from mindformers_adaptive.lab.replay.measures import cost
from mindformers_adaptive.lab.replay.simulate import compare, replay
from mindformers_adaptive.lab.traces.gradients import with_gradients
from mindformers_adaptive.lab.traces.synthetic import synthetic_traces
from mindformers_adaptive.lab.traces.trace import Trace


def rows_of(printed, heading):
    """The rows of the table below a heading, as lists of cells."""
    lines = printed[printed.index(heading) :].split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


@pytest.fixture(scope="module")
def figures():
    return study.study(study.SAME_START, steps=300, seeds=2)


def test_study_prints_the_figures_of_direct_calls(run_python, tmp_path):
    arguments = ["--steps", "300", "--seeds", "2", "--picture", "study.svg"]
    printed = run_python(ROOT / "scripts" / "study.py", *arguments).stdout
    picture = (tmp_path / "study.svg").read_bytes()
    assert run_python(ROOT / "scripts" / "study.py", *arguments).stdout == printed
    assert (tmp_path / "study.svg").read_bytes() == picture
    assert "8 kinds, 2 seeds (0 to 1) of 300 steps each" in printed

    for heading, column, name, params in [
        ("All from the initial scale 2^16", 1, "adaptive", {"loss_scale_value": 65536}),
        ("All from the initial scale 2^16", 3, "dynamic", {"init_loss_scale": 65536, "scale_window": 100}),
        ("Each with its system's own initial scale", 2, "dynamic", {}),
        ("Each with its system's own initial scale", 3, "megatron", {}),
    ]:
        row = {row[0]: row for row in rows_of(printed, heading)}["spikes"]
        traces = [synthetic_traces(300, seed)["spikes"] for seed in (0, 1)]
        measures = [replay(make_policy(name, **params), trace).measures for trace in traces]
        skipped = np.mean([one.skipped for one in measures]) / 0.3
        assert row[column] == f"{skipped:.1f} / {np.mean([one.headroom_lost for one in measures]):.2f}"

    log = read_log(study.LOGS / "megatron_gpt2_n4.log").to_trace()
    measures = replay(make_policy("megatron"), log).measures
    row = {row[0]: row for row in rows_of(printed, "Each with its own defaults")}["megatron_gpt2_n4 (200 steps)"]
    assert row[3] == f"{measures.skipped} / {measures.headroom_lost:.2f} / {measures.known_share:.0%}"


def test_mean_is_that_of_the_kinds(figures):
    on_kinds = figures["Megatron"]
    kinds = [row["skipped"] for kind, row in on_kinds.items() if kind != study.MEAN]
    assert len(kinds) == 8
    assert on_kinds[study.MEAN]["skipped"] == pytest.approx(sum(kinds) / 8)


def test_pytorch_from_the_same_scale_is_the_window_2000_as_the_report_says(figures):
    assert figures["PyTorch"] == figures["dynamic 2000"]


def on_kind(**points):
    named = {study.ADAPTIVE if name == "adaptive" else name: point for name, point in points.items()}
    return {name: {"skipped": skipped, "headroom_lost": bits} for name, (skipped, bits) in named.items()}


def test_prices_at_which_adaptive_costs_least():
    # From 1 bit for 1 step on it costs less than "large", up to 8 for 1 less than "small".
    between = on_kind(adaptive=(2.0, 2.0), large=(1.0, 3.0), small=(10.0, 1.0))
    assert study.cheapest_rates(between) == (1.0, 8.0)
    assert [study.cheapest(between, rate) for rate in (0.5, 2.0, 9.0)] == ["large", study.ADAPTIVE, "small"]
    assert study.cheapest_rates(on_kind(adaptive=(5.0, 2.5), large=(1.0, 3.0), small=(6.0, 1.0))) is None
    several = on_kind(adaptive=(4.0, 2.0), nearer=(1.0, 3.0), farther=(0.0, 6.0), small=(8.0, 1.0), smaller=(20.0, 0.0))
    assert study.cheapest_rates(several) == (3.0, 4.0)
    assert study.cheapest_rates(on_kind(adaptive=(5.0, 2.0), other=(4.0, 2.0))) is None


def test_a_policy_is_better_in_both_only_where_it_is():
    rows = on_kind(adaptive=(2.0, 2.0), both=(1.0, 1.0), one=(1.0, 3.0), equal=(2.0, 2.0), half=(2.0, 1.0))
    assert [name for name, row in rows.items() if study.beats(row, rows[study.ADAPTIVE])] == ["both", "half"]
    assert study.worse(rows, "skipped") == "both, one (by up to 1.0)"
    assert study.worse(rows, "headroom_lost") == "both, half (by up to 1.0)"


def test_look_finds_failed_raises_and_throws():
    # From 2^16: a raise after 20 steps that fails at once, and again; nothing else.
    found = study.look(Trace.exact("flat", [2.0**16] * 42))
    assert (found["after_raise"], found["throws"], found["below_500"], found["window"]) == (1.0, 0, 1.0, 20.0)
    # Three raises, to the window 30, then a fall 15 steps after the last: three of six drops throw it to window 1.
    fall = study.look(Trace.exact("fall", [2.0**30] * 75 + [2.0**8] * 6))
    assert (fall["throws"], fall["after_raise"], fall["bits_at_500"]) == (1, pytest.approx(1 / 6), 0.0)


# Kinds of trace that have rows on the page, and kinds that have none, because there the guided rule costs less.
REPEATED = ("stationary", "spikes", "1.4 bits above, memory 0")


def test_figures_of_the_page_are_those_of_the_guided_study():
    columns, *rows = study.guided_rows(study.guided_study(steps=10_000, seeds=5, kinds=REPEATED))
    loses = [row for row in rows if row[1] != study.MEAN and float(row[4]) > 1]
    _, shown = [table[2:] for table in tables(ENGLISH_DOCS / "study.md") if table[0] == columns]
    assert [row for row in shown if row[1] in REPEATED] == loses


def test_figures_of_the_guided_study_are_those_of_direct_calls():
    results = study.guided_study(steps=600, seeds=2)
    traces = [with_gradients(synthetic_traces(600, seed)["spikes"], 3.0, 0.4, seed) for seed in (0, 1)]
    measures = [replay(make_policy("guided", exchange_rate=5.0), trace).measures for trace in traces]
    skipped = np.mean([one.skipped for one in measures]) / 0.6
    bits = np.mean([one.headroom_lost for one in measures])
    compared = compare({window: study.dynamic(window) for window in study.FIXED_WINDOWS}, traces)
    windows = {window: np.mean([cost(one, 5.0) for one in each]) for window, each in compared.measures.items()}
    best = min(windows, key=windows.get)
    rows = list(study.guided_rows(results))
    [row] = [row for row in rows if row[:2] == ["hidden by 3 bits", "spikes"]]
    assert (row[5], row[7]) == (f"{skipped:.1f} / {bits:.2f}", f"{(skipped + 5 * bits) / windows[best]:.2f}")
    assert row[6].startswith(f"{best}: ")
    # A mean has the mean of the shares above it.
    shares = [float(row[7]) for row in rows[1:] if row[0] == "hidden by 3 bits" and row[1] != study.MEAN]
    [mean] = [row for row in rows if row[:2] == ["hidden by 3 bits", study.MEAN]]
    assert float(mean[7].partition("by kind ")[2].strip(")")) == pytest.approx(np.mean(shares), abs=0.01)
    assert "| hidden by 3 bits | spikes | " in "\n".join(study.guided_report(results))

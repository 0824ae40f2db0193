"""Tuning recommends the cheapest configuration of a rule, says how certain it is, and prints settings to paste."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
import yaml

from mindformers_adaptive import RuleLossScaleUpdateCell
from mindformers_adaptive.lab.configuration import Configuration, default_grid, grid
from mindformers_adaptive.lab.measures import cost
from mindformers_adaptive.lab.policies import make_policy
from mindformers_adaptive.lab.replay import replay
from mindformers_adaptive.lab.tuning import tune
from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules.lanes import Lanes
from tests.conftest import ROOT
from tests.shared.own_rules import Follow

CALM = Trace.exact("calm", [2.0**16] * 2000)
RISING = Trace.exact("rising", 2.0 ** np.linspace(16, 66, 2000))


def test_costs_are_those_of_replaying_each_configuration():
    tried = grid("adaptive", min_scale_window=[5, 50], max_scale_window=[50, 500], scale_factor=[2, 3])
    tuning = tune([CALM, RISING], tried)
    for number, configuration in enumerate(tried):
        expected = [
            cost(replay(make_policy("adaptive", **configuration.arguments), trace).measures) for trace in (CALM, RISING)
        ]
        assert tuning.costs[number].tolist() == pytest.approx(expected)
    costs = tuning.costs.mean(axis=1)
    assert costs[tuning.best] == costs.min()
    below = {
        row["configuration"]: row["headroom_lost"] for row in tuning.rows(len(tried)) if row["cost"] == costs.min()
    }
    assert below[tuning.recommended.label] == min(below.values())
    assert [row["cost"] for row in tuning.rows(3)] == sorted(tuning.costs.mean(axis=1).tolist())[:3]


def test_of_equals_the_first_is_recommended():
    tried = [Configuration("adaptive", hysteresis=count) for count in (2, 1)]
    assert tune([Trace.exact("free", [float("inf")] * 10)], tried).best == 0


@pytest.mark.parametrize(
    ("lower_bound", "upper_bound", "known", "verdict"),
    [(2.0**16, 2.0**16 + 1, 1.0, "known"), (2.0**16, np.inf, 0.9, "known"), (2.0**15, np.inf, 0.0, "a guess")],
)
def test_certainty_tells_how_much_the_trace_knows(lower_bound, upper_bound, known, verdict):
    steps = 1000
    trace = Trace("log", np.full(steps, 2.0**16), np.full(steps, lower_bound), np.full(steps, upper_bound))
    # The loss scale is 2**16, except 2**17 in the step after each full window.
    certainty = tune([trace], [Configuration.dynamic(9)]).certainty()
    assert (certainty["known_share"], certainty["verdict"]) == (pytest.approx(known), verdict)
    json.dumps(certainty, allow_nan=False)


def test_the_known_share_counts_each_step_of_all_traces():
    known, unknown = (Trace("log", *np.full((3, steps), 4.0) * [[1], [of], [2]]) for steps, of in ((300, 1), (100, 0)))
    assert tune([known, unknown], [Configuration.dynamic(500, loss_scale_value=2.0)]).known_share(0) == 0.75


def test_certainty_shows_costs_at_lowest_and_highest_ceilings():
    trace = Trace("log", np.full(1000, 2.0**16), np.full(1000, 2.0**15), np.full(1000, 2.0**20))
    tried = [Configuration.dynamic(9), Configuration.dynamic(99)]
    assumed = tune([trace], tried).certainty()["assumed"]
    for name, ceiling in (("lowest", 2.0**15), ("highest", np.nextafter(2.0**20, 0))):
        costs = [
            cost(replay(make_policy("adaptive", **configuration.arguments), Trace.exact("", [ceiling] * 1000)).measures)
            for configuration in tried
        ]
        rates = assumed[f"the {name} possible ceilings"]
        assert (rates["cost"], rates["smallest"]) == pytest.approx((costs[1], min(costs)))
        assert rates["best"] == tried[int(np.argmin(costs))].label


def test_bits_are_free_down_to_16_and_then_decide():
    tried = [Configuration.dynamic(5000, loss_scale_value=2.0**power) for power in (8, 7, 6, 9)]
    tuning = tune([Trace.exact("calm", [1.5 * 2.0**23] * 1000)], tried)
    assert [row["configuration"].split("=")[1] for row in tuning.rows()] == ["512", "256", "128", "64"]
    assert [row["too_low"] for row in tuning.rows()] == [0, 0, 1000, 1000]
    assert [row["cost"] for row in tuning.rows()] == [0, 0, 1000, 1000]
    assert [row["on_front"] for row in tuning.rows()] == [True, True, False, False]
    assert "0 skipped, 14.6 bits below" in tuning.text()
    assert "1000 more than 16 bits too low" in tune(tuning.traces, tried[2:3]).text()


def test_assumptions_of_ones_own_replace_the_bounds():
    trace = Trace("log", np.full(100, 2.0**16), np.zeros(100), np.full(100, np.inf))
    higher = dataclasses.replace(trace, ceiling=np.full(100, 2.0**20))
    tuning = tune([trace], [Configuration.dynamic(9)], assumptions={"four bits more": [higher]})
    assert tuning.certainty()["assumed"].keys() == {"four bits more"}
    assert tuning.assumed["four bits more"][0, 0] != tuning.costs[0, 0]


def test_leaving_a_trace_out_shows_what_the_rest_recommends():
    tried = [Configuration.dynamic(window) for window in (10, 1000)]
    tuning = tune([CALM, RISING], tried)
    by_trace = {row["trace"]: row for row in tuning.certainty()["left_out"]}
    assert by_trace["calm"]["recommended"] == "dynamic 10"
    assert by_trace["calm"]["above_smallest"] == pytest.approx(tuning.costs[0, 0] - tuning.costs[1, 0])
    assert by_trace["rising"]["recommended"] == "dynamic 1000"
    assert tune([CALM], tried).certainty()["left_out"] == []


def test_text_holds_the_table_the_section_and_how_sure_it_is():
    tuning = tune([CALM, RISING], [Configuration.dynamic(10), Configuration("adaptive", hysteresis=2)])
    text = tuning.text(2)
    assert tuning.recommended.scale_sense().rstrip() in text
    assert "adaptive 20-1000 hysteresis=2" in text
    assert "Without trace 'calm': " in text
    assert "possible ceilings" not in text
    assert len(tuning.text().splitlines()) <= 15


def test_settings_are_pasted_only_where_they_beat_the_run():
    tried, of_run = [Configuration.dynamic(1000)], replay(make_policy("fixed", loss_scale=2.0**16), CALM).measures
    assert tune([CALM], tried).settings_to_paste is not None
    tuning = tune([CALM], tried, recorded=[of_run])
    assert (of_run.skipped, tuning.settings_to_paste) == (0, None)
    assert "The run itself: 0 skipped, 0.0 bits" in tuning.text()
    assert "did at least as well" in tuning.text()


def test_what_the_traces_decide_comes_before_what_costs_less():
    # The log shows only that the used loss scale does not overflow, not whether it could climb to the assumed ceilings.
    trace = Trace("log", np.full(1000, 2.0**34), np.full(1000, 2.0**16), np.full(1000, np.inf))
    tuning = tune([trace], [Configuration.dynamic(250), Configuration.dynamic(2000)])
    assert tuning.costs[0, 0] < tuning.costs[1, 0]
    assert tuning.recommended.label == tuning.rows(1)[0]["configuration"] == "dynamic 2000"
    assert tuning.certainty()["verdict"] == "known"


@pytest.mark.parametrize(("known", "swept"), [(1.0, 3000), (0.95, 3000), (0.5, 2000)])
def test_a_log_that_decides_too_little_is_swept_in_part(known, swept):
    """Settings cannot follow from such a log, even if its last steps are all known."""
    lower = np.where(np.arange(3000) < round(3000 * (1 - known)), 0.0, 2.0**16)
    trace = Trace("log", np.full(3000, 2.0**16), lower, np.full(3000, np.inf))
    tuning = tune([trace], [Configuration.dynamic(5000)])
    assert len(tuning.traces[0]) == swept
    assert ("2,000 of the 3,000" in tuning.text()) == (swept < 3000)
    assert (tuning.settings_to_paste is None) == (known < 0.9)
    assert tuning.certainty()["known_share"] == pytest.approx(known)


def test_settings_of_analyze_come_first_among_equals():
    tried = [Configuration.dynamic(window) for window in (5000, 3000)]
    assert [tune([CALM], tried, advised=each).recommended for each in tried] == tried
    dear = Configuration.dynamic(10)
    assert tune([CALM], [*tried, dear], advised=dear).recommended == tried[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "recommends the same settings"),
        (["--grid", "loss_scale_value=8192"], "that were not tried here: adaptive"),
        (["--rule", "guided"], "that were not tried here"),
    ],
)
def test_tune_says_why_analyze_has_other_settings(run_program, tmp_path, options, said):
    flags = [True] * 5 + [False] * 300
    scales = [2.0 ** max(17 - step, 12) for step in range(305)]
    steps = zip(range(1, 306), flags, scales, strict=True)
    lines = [{"step": step, "overflow": flag, "loss_scale": scale} for step, flag, scale in steps]
    (record := tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, printed, _ = run_program("tune", record, *options)
    assert (code, said in " ".join(printed.split())) == (0, True), printed


def test_text_shows_other_assumptions_where_they_matter():
    trace = Trace("log", np.full(1000, 2.0**16), np.full(1000, 1.5 * 2.0**14), np.full(1000, 2.0**20))
    text = tune([trace], [Configuration.dynamic(9)]).text(1)
    # Tuning does not offer settings to paste if they rest on assumed ceilings.
    assert ("scale_sense:" in text, "No settings to paste: " in text) == (False, True)
    assert "with the lowest possible ceilings: " in text
    assert "with the highest possible ceilings: " in text


def test_configuration_that_applies_nothing_is_not_on_the_front():
    stuck = Configuration("adaptive", min_loss_scale=2.0**16)
    rows = tune([Trace.exact("low", [2.0**10] * 50)], [stuck, Configuration("adaptive")]).rows()
    assert [(row["on_front"], row["headroom_lost"]) for row in rows] == [(True, pytest.approx(0.0)), (False, None)]
    json.dumps(rows, allow_nan=False)


@pytest.mark.parametrize(
    "configuration",
    [
        Configuration("adaptive"),
        Configuration.dynamic(200, loss_scale_value=2.0**32),
        Configuration("adaptive", max_loss_scale=2.0**100, min_loss_scale=1e-5, hysteresis=2, scale_factor=1.5),
        Configuration("adaptive", loss_scale_value=50000.5, scale_window=100, shrink_from_min_window=True),
    ],
)
def test_section_to_paste_makes_the_cell_that_was_recommended(configuration):
    from mindformers_adaptive.cells.update_cells import AdaptiveLossScaleUpdateCell

    section = yaml.safe_load(configuration.scale_sense())["scale_sense"]
    assert section.pop("type") == "AdaptiveLossScale"
    cell = AdaptiveLossScaleUpdateCell(**section)
    assert cell.rule.arguments == configuration.rule.arguments
    assert (cell.get_loss_scale(), cell.state()["scale_window"]) == configuration.start[:2]
    assert Configuration("adaptive", **section).start == configuration.start


@pytest.mark.parametrize("policy", ["adaptive", "guided", "tests.shared.own_rules.Follow"])
def test_a_configuration_can_be_pickled(policy):
    configuration = Configuration(policy, loss_scale_value=2.0**12)
    copied = pickle.loads(pickle.dumps(configuration))
    assert (copied, copied.start) == (configuration, configuration.start)
    assert copied.rule.step(copied.start, True) == configuration.rule.step(configuration.start, True)


def test_default_grid_has_each_configuration_once():
    tried = grid("adaptive", **default_grid("adaptive"))
    assert len(tried) == 900
    assert {configuration.label.split()[0] for configuration in tried} == {"dynamic", "adaptive"}
    assert len({configuration.label for configuration in tried}) == len(tried)


@pytest.mark.parametrize(("gradient_format", "margin"), [("float16", 6), ("float8_e5m2", 2)])
def test_settings_to_paste_name_the_margin(gradient_format, margin):
    configuration = Configuration("guided", gradient_format=gradient_format)
    assert f"  margin: {margin}\n" in configuration.scale_sense()
    assert f"    margin={margin},\n" in configuration.update_cell()


def test_equal_rules_of_a_grid_are_one_object():
    configurations = grid("adaptive", loss_scale_value=[2.0**8, 2.0**16], hysteresis=[1, 2])
    assert len({id(each.rule) for each in configurations}) == 2
    # 1 and True are equal in Python, but True is still no number of overflows.
    with pytest.raises(TypeError, match="'hysteresis' must be an integer"):
        Configuration("adaptive", hysteresis=True)


def test_grid_leaves_out_windows_that_do_not_fit():
    tried = grid("adaptive", min_scale_window=[20, 100], max_scale_window=[50, 100], scale_window=[20, 100])
    names = ("min_scale_window", "max_scale_window", "scale_window")
    windows = [tuple(configuration.arguments[name] for name in names) for configuration in tried]
    assert windows == [(20, 50, 20), (20, 100, 20), (20, 100, 100), (100, 100, 100)]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: grid("adaptive", window=[1]), TypeError, r"'adaptive' has no parameter 'window'"),
        (
            lambda: grid("adaptive", max_scale_window=[5]),
            ValueError,
            r"at least one valid combination .*\[5\].* at most 'max_scale_window'",
        ),
        (lambda: grid("adaptive", hysteresis=[0]), ValueError, r"'hysteresis' must be at least 1, but got 0"),
        (lambda: Configuration("adaptive", scale_window=25), ValueError, r"of the ladder .* give another value"),
        (lambda: Configuration("adaptive", max_scale_window=5), ValueError, r"'max_scale_window' must be .* value"),
        (lambda: grid("guided", windows=[1]), TypeError, r"no parameter 'windows'. .* loss_scale_value, margin"),
        (lambda: grid("guided", margin=[-1]), ValueError, r"'margin' must be at least 0, but got -1"),
        (
            lambda: grid("guided", loss_scale_value=[1000]),
            ValueError,
            r"'loss_scale_value' must be .*power of two .* got 1000.* another value",
        ),
        (lambda: grid("guided", max_loss_scale=[2.0]), ValueError, r"'loss_scale_value' must lie between"),
        (lambda: tune([]), ValueError, r"'traces' must have at least 1 trace, but got none"),
        (lambda: tune([CALM], []), ValueError, r"'configurations' must have at least 1 configuration"),
    ],
)
def test_bad_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


GUIDED = Configuration("guided", loss_scale_value=2.0**10, margin=3, max_loss_scale=2.0**20)


@pytest.mark.parametrize(
    ("configuration", "label"),
    [
        (GUIDED, "guided start=1024 margin=3 max_loss_scale=2^20"),
        (Configuration("tests.shared.own_rules.Follow", margin=1), "follow margin=1"),
        (Configuration(Follow), "follow"),
        (Configuration("adaptive", scale_window=20), "adaptive 20-1000"),
        (Configuration("adaptive", scale_window=30), "adaptive 20-1000 scale_window=30"),
        (Configuration.dynamic(20, shrink_from_min_window=True), "dynamic 20 shrink_from_min_window=1"),
    ],
)
def test_label_tells_what_is_not_the_default(configuration, label):
    assert configuration.label == label


@pytest.mark.parametrize(
    ("configuration", "section"),
    [
        (
            GUIDED,
            {"type": "GradientGuidedLossScale", "loss_scale_value": 1024, "margin": 3} | {"max_loss_scale": 2**20},
        ),
        (
            Configuration(Follow, margin=1),
            {
                "type": "RuleLossScaleUpdateCell",
                "rule": "tests.shared.own_rules.Follow",
                "loss_scale_value": 65536,
                "margin": 1,
            },
        ),
    ],
)
def test_section_of_other_rules(configuration, section):
    assert yaml.safe_load(configuration.scale_sense())["scale_sense"] == section


def test_default_grid_of_a_users_rule_has_its_values():
    tried = grid("tests.shared.own_rules.Follow", **default_grid("tests.shared.own_rules.Follow"))
    assert len(tried) == 15
    assert {configuration.rule.margin for configuration in tried} == {1, 2, 4}


@pytest.mark.parametrize(
    ("name", "cap"), [("tests.shared.own_rules.CappedGuided", 10), ("tests.shared.own_rules.CappedAdaptive", 1024)]
)
def test_users_rule_made_from_ours_has_its_own_arguments(name, cap):
    tried = grid(name, **default_grid(name), cap=[cap])
    assert {configuration.rule.cap for configuration in tried} == {cap}
    section = yaml.safe_load(tried[0].scale_sense())["scale_sense"]
    assert RuleLossScaleUpdateCell(**{key: section[key] for key in section if key != "type"}).rule.cap == cap
    assert {"exchange_rate", "max_scale_window", "scale_window"}.isdisjoint(section)
    assert tried[0].label.startswith(name.rpartition(".")[2].replace("Capped", "capped_").lower())


def test_a_vector_that_is_called_scale_window_is_no_window():
    policy = make_policy("tests.shared.own_rules.Windows")
    assert Lanes([policy.rule], [policy.current]).scale_window is None
    replayed = replay(policy, CALM)
    assert (replayed.scale_window, replayed.measures.window_changes) == (None, 0)


def test_text_fits_into_100_columns(tmp_path, run_program):
    samples = ROOT / "tests" / "record" / "samples"
    for command in (
        ["tune", samples / "megatron_gpt2_n4.log", "--rows", "10"],
        ["compare", samples / "megatron_gpt2_n4.log"],
        ["tune", samples / "mindformers_1_9_cpu.log"],
        ["tune", "synthetic:spikes"],
    ):
        code, printed, _ = run_program(*command)
        assert code == 0
        assert [line for line in printed.splitlines() if len(line) > 100] == []

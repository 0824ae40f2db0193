"""The study of the guided rule takes its numbers from replays, and the rule loses as few steps as the pages say."""

import numpy as np

from mindformers_adaptive.lab.replay import replay
from mindformers_adaptive.lab.running_rule import start_rule
from mindformers_adaptive.rules import guided
from scripts.studies import guided_rule as study
from tests.shared.pages import figure


def test_figures_of_a_short_study_are_those_of_direct_calls():
    groups = {name: traces[:2] for name, traces in study.groups_of_traces(300, range(2)).items()}
    measured = study.measure(start_rule("guided", margin=3), groups)
    for name, traces in groups.items():
        runs = [replay(start_rule("guided", margin=3), trace) for trace in traces]
        assert np.isclose(measured[name]["skipped"], 1000 * np.mean([run.overflow.mean() for run in runs]))
        far = [
            (run.loss_scale * 2.0**16 < trace.ceiling)[~run.overflow].mean()
            for run, trace in zip(runs, traces, strict=True)
        ]
        assert np.isclose(measured[name]["far"], np.mean(far))


def test_a_changed_constant_is_back_afterwards():
    with study.changed("DROP", 5):
        assert start_rule("guided").step(True) == 2.0**11
    assert guided.DROP == study.CONSTANTS["DROP"][0] == 10
    assert all(getattr(guided, name) == values[0] for name, values in study.CONSTANTS.items() if name != "margin")


def test_the_guided_rule_loses_few_steps():
    data = figure("guided_rule")
    of_guided, of_dynamic = (data["rules"][name] for name in (study.GUIDED, study.DYNAMIC))
    aimed_at = {
        "gradients show the ceiling": (0.7, 0.015),
        "regimes": (2.1, 0.01),
        "hidden by 3 bits": (1.0, 0.01),
        "a ceiling of its own": (1.12, 0.001),
    }
    for group, (skipped, far) in aimed_at.items():
        assert of_guided[group]["skipped"] <= skipped
        assert of_guided[group]["far"] <= far
    assert all(of_guided[group]["skipped"] < of_dynamic[group]["skipped"] for group in study.MAIN)

"""The study of the guided rule takes its numbers from replays, and the rule loses as few steps as the pages say."""

import dataclasses
import math

import numpy as np
import pytest

from mindformers_adaptive.lab.replay import replay
from mindformers_adaptive.lab.running_rule import start_rule
from mindformers_adaptive.rules import guided
from mindformers_adaptive.rules.formats import FORMATS
from scripts.studies import guided_rule as study
from scripts.studies.synthetic import synthetic_trace, with_gradients
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


def test_figures_of_the_page_are_those_of_the_present_rules():
    data = figure("guided_rule")
    seeds = range(study.FIRST_SEED, study.FIRST_SEED + data["seeds"])
    groups = study.groups_of_traces(data["steps"], seeds)
    for name in (study.GUIDED, study.DYNAMIC):
        assert study.measure(study.RULES[name], {key: groups[key] for key in study.MAIN}) == {
            key: data["rules"][name][key] for key in study.MAIN
        }
    present = study.measure(study.RULES[study.GUIDED], {key: groups[key] for key in study.FROM_STREAMS})
    assert present == {key: data["constants"]["DROP 10"][key] for key in study.FROM_STREAMS}


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


@pytest.mark.parametrize(("level", "offset", "spread", "memory"), study.INDEPENDENT_CEILINGS)
def test_a_ceiling_of_its_own_is_not_what_the_gradients_show(level, offset, spread, memory):
    trace = study.independent_ceiling(20_000, 0, level, offset, spread, memory)
    ceiling = np.log2(trace.ceiling)
    beyond = np.log2(65504 / trace.largest_gradient) - ceiling
    assert (ceiling.mean(), ceiling.std()) == (pytest.approx(level, abs=0.01), pytest.approx(0.05, abs=0.005))
    assert (beyond.mean(), beyond.std()) == (pytest.approx(offset, abs=0.15), pytest.approx(spread, abs=0.1))
    shown = beyond + ceiling
    assert np.corrcoef(shown[1:], shown[:-1])[0, 1] == pytest.approx(memory, abs=0.03)
    assert np.corrcoef(shown, ceiling)[0, 1] == pytest.approx(0, abs=0.05)


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
def test_guided_rule_skips_no_more_with_8_bit_gradients(name):
    kinds = ("spikes", "alternating regimes")
    traces = [synthetic_trace(kind, 1000, seed) for kind in kinds for seed in (0, 1)]
    rounded = [in_format(with_gradients(trace, gradient_format=FORMATS[name]), FORMATS[name]) for trace in traces]

    def skipped(running, traces):
        return study.measure(running, {"all": traces})["all"]["skipped"]

    in_8_bits = skipped(start_rule("guided", gradient_format=name), rounded)
    assert in_8_bits <= skipped(study.RULES[study.GUIDED], traces) + 1.0
    assert in_8_bits < skipped(study.RULES[study.DYNAMIC], traces)

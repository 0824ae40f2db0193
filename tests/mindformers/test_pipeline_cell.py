"""The pipeline train-step cell skips, clips and accumulates correctly on a CPU, with or without a sharded optimizer."""

import json
import math

import numpy as np
import pytest
from pipeline_cell import MAX_NORM, OVERFLOWS, SCALE

from mindformers_adaptive.rules.adaptive import AdaptiveRule
from tests.conftest import ROOT
from tests.shared.launched import run_in_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    run_in_processes(1, folder, ROOT / "tests" / "mindformers" / "pipeline_cell.py", folder)
    return json.loads((folder / "seen.json").read_text())


KINDS = ["sharded", "plain"]


@pytest.mark.parametrize("kind", KINDS)
def test_overflow_in_one_micro_batch_skips_the_step(seen, kind):
    rule = AdaptiveRule(max_scale_window=2, min_scale_window=2)
    state = rule.start(SCALE)
    for index, step in zip(OVERFLOWS, seen[kind], strict=True):
        state = rule.step(state, index is not None)
        assert (step["overflow"], step["loss_scale"]) == (index is not None, state.loss_scale)
        assert step["unchanged"] is step["overflow"]
    assert {step["overflow"] for step in seen[kind]} == {True, False}


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_comes_first_and_does_not_hide_an_inf(seen, kind):
    for step in seen[kind]:
        assert math.isfinite(step["norm"]) is not step["overflow"]
        # The gradient norm is measured before clipping. It is above MAX_NORM, so clipping has an effect.
        assert step["overflow"] or step["norm"] > MAX_NORM
        assert kind == "plain" or step["finite_loss"]


def test_accumulated_gradients_are_cleared_in_every_step(seen):
    assert [step["accumulated"] for kind in KINDS for step in seen[kind]] == [0.0] * len(KINDS) * len(OVERFLOWS)


def test_weights_equal_accumulation_in_the_ordinary_train_step(seen):
    for step in seen["sharded"]:
        np.testing.assert_allclose(step["weight"], step["control"], rtol=2.0**-9)


def test_fp16_gradients_of_a_sharded_optimizer_are_divided(seen):
    np.testing.assert_allclose(seen["FP16 weights"]["weight"], seen["FP16 weights"]["expected"], atol=2.0**-9)


def test_pipeline_training_goes_back_to_a_checkpoint(seen):
    end, again = seen["went back"]
    assert again == end

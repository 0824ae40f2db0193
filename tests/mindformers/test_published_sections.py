"""The ``runner_wrapper`` sections in MindFormers' YAML files and docs, from 72 branches and tags (0.1 to 2.0)."""

import copy
import warnings

import mindspore
import pytest

from mindformers_adaptive.mindformers.launcher import load_config
from tests.conftest import CONFIG
from tests.mindformers.training_runs import build_train_step
from tests.shared.networks import Dense

pytestmark = pytest.mark.usefixtures("registry_put_back", "in_a_folder_of_its_own")

TRAIN_STEP = "MFTrainOneStepCell"
CLIPPED = {"use_clip_grad": True}


def dynamic(loss_scale_value, scale_factor=2, scale_window=1000):
    section = {"loss_scale_value": loss_scale_value, "scale_factor": scale_factor, "scale_window": scale_window}
    return {"type": "DynamicLossScaleUpdateCell", **section}


def fixed(loss_scale_value):
    return {"type": "FixedLossScaleUpdateCell", "loss_scale_value": loss_scale_value}


# Sections of YAML files that must train without a warning. Each entry has the value of scale_sense, and a dict of the
# section's other keys.
TRAINED = [
    # The files have ten powers of two as the initial loss scale. Train the smallest, a usual and the largest of them.
    *((dynamic(2**exponent), CLIPPED) for exponent in (0, 16, 32)),
    (dynamic(128, scale_window=100), CLIPPED),
    (dynamic(4096, scale_window=500), CLIPPED),
    (dynamic(1, scale_window=2000), CLIPPED),
    (dynamic(2**16), {"use_clip_grad": False}),
    (dynamic(2**16), {**CLIPPED, "max_grad_norm": 1.0}),
    (dynamic(4096), {**CLIPPED, "max_grad_norm": 1.0}),
    (dynamic(2**16, scale_window=400), {**CLIPPED, "max_grad_norm": 0.1}),
    (dynamic(16384), {}),
    (dynamic(4096, 1, 100_000), {**CLIPPED, "max_grad_norm": 1.0}),
    (dynamic(4096, 1), CLIPPED),
    (fixed(1024), {}),
    (fixed(1024), {**CLIPPED, "max_grad_norm": 5.0}),
    (fixed(1), CLIPPED),
    (1.0, CLIPPED),
    (1, CLIPPED),
    (1.0, {**CLIPPED, "max_grad_norm": 1.0}),
    (1, {**CLIPPED, "local_norm": True}),
    ({**dynamic(2**32, scale_window=20), "type": "AdaptiveLossScaleUpdateCell"}, CLIPPED),
]
# Sections of YAML files with which training gives a warning, and the expected warning.
WARNED = [
    (dynamic(65535), CLIPPED, "got 65535.* near it is 65536"),
    (dynamic(2**32), {"enable_global_norm": True}, "'runner_wrapper.enable_global_norm' .*'use_clip_grad: True'"),
    (1, {**CLIPPED, "enable_check_overflow": False}, "'runner_wrapper.enable_check_overflow' .*Take it out"),
    (1.0, {**CLIPPED, "enable_check_overflow": False}, "'runner_wrapper.enable_check_overflow' .*Take it out"),
    (1, {"local_norm": True, "loss_scale_value": 65536, **CLIPPED}, "'runner_wrapper.loss_scale_value' .*: 65536'"),
]
# Sections of YAML files that no MindFormers from 1.6 on can build, and the remedy in the error message.
REFUSED = [
    ({"type": "TrainOneStepCell", "sens": 1024}, "Use MFTrainOneStepCell.*'scale_sense: 1024' for 'sens'"),
    ({"type": "TrainOneStepCell"}, "Use MFTrainOneStepCell"),
    ({"type": "FilipTrainOneStepWithLossScaleWrapper"}, "Use MFTrainOneStepCell"),
    ({"type": "TrainOneStepWithClipGN", "scale_sense": fixed(1024)}, "Use MFTrainOneStepCell"),
    (
        {"type": "TrainOneStepWithClipGN", "scale_sense": dynamic(65536), **CLIPPED, "clip_norm": 5.0},
        "Use MFTrainOneStepCell.*'max_grad_norm: 5.0' for 'clip_norm'",
    ),
]


def load(section):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not on the ladder")
        return load_config(CONFIG, {"runner_wrapper": copy.deepcopy(section)})


def scale_after_a_step(config):
    """Return the loss scale after an overflowed step of the train step that MindFormers builds from ``config``."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*scale_window")
        train_step = build_train_step(config)
    assert bool(train_step(*Dense.batch(overflow=True))[1])
    return float(train_step.scale_sense.asnumpy())


def first_scale(scale_sense):
    return scale_sense["loss_scale_value"] if isinstance(scale_sense, dict) else scale_sense


@pytest.mark.parametrize(("scale_sense", "keys"), TRAINED, ids=str)
def test_what_mindformers_trains_is_trained(scale_sense, keys):
    section = {"type": TRAIN_STEP, "scale_sense": scale_sense, **keys}
    factor = scale_sense.get("scale_factor", 1) if isinstance(scale_sense, dict) else 1
    assert scale_after_a_step(load(section)) == max(first_scale(scale_sense) / factor, 1)


# A scale_sense that is a number has no type to change.
WITH_A_TYPE = [(scale_sense, keys) for scale_sense, keys in TRAINED if isinstance(scale_sense, dict)]


@pytest.mark.parametrize(("scale_sense", "keys"), WITH_A_TYPE, ids=str)
def test_only_the_type_has_to_be_changed(scale_sense, keys):
    section = {"type": TRAIN_STEP, "scale_sense": {**scale_sense, "type": "AdaptiveLossScale"}, **keys}
    if "scale_window" not in scale_sense:
        with pytest.raises(TypeError, match=r"lacks scale_factor, scale_window.*'scale_factor: 2'.*'scale_window: 20'"):
            load(section)
    elif scale_sense["scale_factor"] == 1:
        # With a scale factor of 1 the loss scale never changes, so the adaptive cell is rejected.
        with pytest.raises(ValueError, match=r"'scale_factor' must be .* above 1.*FixedLossScaleUpdateCell"):
            load(section)
    else:
        assert scale_after_a_step(load(section)) == max(first_scale(scale_sense) / 2, 1)


@pytest.mark.parametrize(("scale_sense", "keys", "message"), WARNED, ids=str)
def test_what_mindformers_ignores_is_trained_with_a_warning(scale_sense, keys, message):
    with pytest.warns(UserWarning, match=message):
        config = load({"type": TRAIN_STEP, "scale_sense": scale_sense, **keys})
    factor = 2 if isinstance(scale_sense, dict) else 1
    assert scale_after_a_step(config) == max(first_scale(scale_sense) / factor, 1)


@pytest.mark.parametrize(("section", "remedy"), REFUSED, ids=str)
def test_former_train_steps_are_refused_with_their_successor(section, remedy):
    with pytest.raises((TypeError, ValueError), match=f"'{section['type']}'.*{remedy}"):
        load(section)

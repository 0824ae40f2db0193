"""A YAML file that scales the loss of a bfloat16 model is told that it need not."""

import warnings

import mindformers  # noqa: F401 - its import puts warnings into its log, where pytest does not see them
import pytest
import yaml
from conftest import ROOT

from mindformers_adaptive.integration.launcher import load_config
from mindformers_adaptive.integration.precision import warn_of_needless_scaling

CONFIG = ROOT / "configs" / "tiny_llama_cpu_fp16.yaml"


def warned(dtype, cell):
    config = yaml.safe_load(CONFIG.read_text())
    config["model"]["model_config"]["compute_dtype"] = dtype
    config["runner_wrapper"]["scale_sense"] = cell
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_needless_scaling(config)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    "cell", ["DynamicLossScaleUpdateCell", "AdaptiveLossScaleUpdateCell", "GradientGuidedLossScaleUpdateCell"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "bf16"])
def test_a_moving_scale_in_bfloat16_gets_one_warning(dtype, cell):
    [message] = warned(dtype, {"type": cell})
    assert f"'model.model_config.compute_dtype' is {dtype}" in message
    assert f"is of type {cell}" in message
    assert "Set 'scale_sense: 1.0'" in message


@pytest.mark.parametrize(
    ("dtype", "cell"),
    [
        ("float16", {"type": "AdaptiveLossScaleUpdateCell"}),
        ("bfloat16", {"type": "FixedLossScaleUpdateCell"}),
        ("bfloat16", 1.0),
        (None, None),
    ],
)
def test_others_get_none(dtype, cell):
    assert warned(dtype, cell) == []


def test_the_warning_comes_when_a_file_is_loaded():
    changes = {"model.model_config.compute_dtype": "bfloat16"}
    with pytest.warns(UserWarning, match="needs no loss scaling") as caught:
        load_config(ROOT / "configs" / "ascend" / "pretrain_llama2_7b_fp16.yaml", changes)
    assert len(caught) == 1

"""Test the YAML section ``training.loss_scale``, and how a YAML file chooses between MindFormers' two trainers."""

import warnings

import pytest
import yaml

from mindformers_adaptive import AdaptiveLossScaler, GradientGuidedLossScaler
from mindformers_adaptive.mindformers import launcher, pynative_launcher
from mindformers_adaptive.mindformers.pynative_section import (
    check_config,
    is_for_pynative_trainer,
    read_config,
    read_section,
)
from mindformers_adaptive.mindformers.pynative_trainer import LossScaledTraining, make_scaler, stock_trainer
from tests.shared.versions import BEFORE_2

ADAPTIVE = {"type": "AdaptiveLossScale", "loss_scale_value": 4096, "scale_window": 20}


@pytest.mark.parametrize(
    ("section", "scaler", "expected"),
    [
        (ADAPTIVE, AdaptiveLossScaler, {"loss_scale": 4096.0, "scale_window": 20}),
        ({"type": "AdaptiveLossScaleUpdateCell"}, AdaptiveLossScaler, {"loss_scale": 65536.0, "scale_window": 20}),
        (ADAPTIVE | {"scale_window": 500}, AdaptiveLossScaler, {"scale_window": 500}),
        ({"type": "GradientGuidedLossScaleUpdateCell"}, GradientGuidedLossScaler, {"loss_scale": 65536.0}),
        (
            {"type": "RuleLossScaleUpdateCell", "rule": "tests.shared.own_rules.Plain", "window": 7},
            object,
            {"loss_scale": 65536.0},
        ),
        (1, AdaptiveLossScaler, {"loss_scale": 1.0}),
    ],
)
def test_a_section_becomes_the_scaler_of_its_rule(section, scaler, expected):
    scaler_made = make_scaler(section)
    assert isinstance(scaler_made, scaler)
    assert scaler_made.state().items() >= expected.items()


def test_a_number_is_a_scale_that_stays():
    scaler = make_scaler(1024)
    state = scaler.update_cell.rule_state()
    for overflow in (True, *[False] * 2000):
        state = scaler.rule.step(state, overflow)
        assert state.loss_scale == 1024.0


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        ("big", TypeError, "'training.loss_scale' must be a section .*got 'big'.*'type: Adaptive"),
        (True, TypeError, "'training.loss_scale' must be a section .*got True.*'type: Adaptive"),
        (-2.0, ValueError, "'training.loss_scale' must be .*, but got -2.0"),
        ({}, TypeError, "'training.loss_scale.type' must be .* missing.*'type: Adaptive"),
        ({"type": "Dynamic"}, ValueError, "'training.loss_scale.type' must be Adaptive.* 'Dynamic'"),
        (
            ADAPTIVE | {"window": 3},
            TypeError,
            "'training.loss_scale' must have keys .* got 'window'",
        ),
        (ADAPTIVE | {"scale_facto": 3}, TypeError, "got 'scale_facto'. Did you mean 'scale_factor'?"),
        (ADAPTIVE | {"scale_factor": 1}, ValueError, "'training.loss_scale': 'scale_factor' must be .* above 1"),
        (ADAPTIVE | {"loss_scale_value": 0}, ValueError, "'training.loss_scale': 'loss_scale_value' must be"),
        (
            ADAPTIVE | {"min_scale_window": 0},
            ValueError,
            "'training.loss_scale': 'min_scale_window' must be",
        ),
        ({"type": "RuleLossScaleUpdateCell"}, ValueError, "'training.loss_scale': 'rule' must be .* 'module.Class'"),
        ({"type": "RuleLossScaleUpdateCell", "rule": 3}, TypeError, "'training.loss_scale': 'rule' must be"),
        ({"type": "GradientGuidedLossScaleUpdateCell", "scale_factor": 4}, ValueError, "'training.loss_scale': .*must"),
    ],
)
def test_wrong_section_is_refused_with_key_and_remedy(section, error, message):
    with pytest.raises(error, match=message):
        read_section(section)


def test_each_rule_has_a_short_name():
    for short, rule in (("AdaptiveLossScale", "adaptive"), ("GradientGuidedLossScale", "guided")):
        for name in (short, f"{short}UpdateCell"):
            assert read_section({"type": name, "loss_scale_value": 8})["rule"].name == rule
    with pytest.raises(ValueError, match=r"'training\.loss_scale\.type' must be"):
        read_section({"type": "RuleLossScale", "rule": "guided"})


def test_all_wrong_keys_are_named_at_once():
    with pytest.raises(TypeError) as error:
        read_section(ADAPTIVE | {"scale_facto": 3, "windows": 4})
    assert "'scale_facto', 'windows'. Did you mean 'scale_factor' for 'scale_facto'" in str(error.value)


def test_loss_scales_may_be_written_as_powers_of_two():
    section = ADAPTIVE | {"loss_scale_value": "2^10", "max_loss_scale": "2^20"}
    assert read_section(section).items() >= {"loss_scale_value": 1024.0, "max_loss_scale": 2.0**20}.items()
    # The section itself is not changed.
    assert section["loss_scale_value"] == "2^10"
    assert read_section("2^10")["loss_scale_value"] == 1024.0


@pytest.mark.parametrize(
    ("content", "mode", "expected"),
    [
        ({"training": {"steps": 3}}, None, True),
        ({"training": {"steps": 3}, "context": {"mode": 1}}, None, True),
        ({"training": {"steps": 3}, "context": {"mode": 0}}, 1, True),
        ({"runner_config": {"epochs": 1}, "context": {"mode": 1}}, None, False),
        ({"runner_config": {"epochs": 1}}, 1, False),
        ({"training": None}, None, False),
        (["training"], None, False),
        (None, None, False),
    ],
)
def test_the_sections_say_which_trainer_a_file_is_for(content, mode, expected):
    assert is_for_pynative_trainer(content, mode) is expected


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (
            {"training": {"steps": 3}, "runner_wrapper": {"type": "x"}},
            None,
            "one of MindFormers' two trainers",
        ),
        ({"training": {"steps": 3}, "context": {"mode": 0}}, None, "'context.mode' must be 1 .* but is 0. Set it to 1"),
        ({"training": {"steps": 3}}, 0, "'context.mode' must be 1 .* but is 0"),
    ],
)
def test_file_for_the_wrong_trainer_or_mode_is_refused(content, mode, message):
    with pytest.raises(ValueError, match=message):
        is_for_pynative_trainer(content, mode)


def test_section_is_taken_out_and_the_dict_stays():
    config = {"training": {"steps": 3, "loss_scale": ADAPTIVE}, "model": {}}
    assert read_config(config) == ({"training": {"steps": 3}, "model": {}}, ADAPTIVE)
    assert config["training"]["loss_scale"] is ADAPTIVE


@pytest.mark.parametrize(("config", "error"), [([], TypeError), ({"training": 3}, TypeError), (None, TypeError)])
def test_what_holds_no_keys_is_refused(config, error):
    with pytest.raises(error, match="must be a"):
        read_config(config)


@pytest.mark.parametrize(
    ("config", "section", "message"),
    [
        (
            {"model": {"compute_dtype": "float16"}},
            None,
            "is float16, .* there is no 'training.loss_scale', .*Add",
        ),
        ({"model": {"compute_dtype": "fp16"}}, None, "is fp16, .* the loss is not scaled"),
        ({"model": {"compute_dtype": "bfloat16"}}, ADAPTIVE, "is bfloat16, .* needs no loss scaling"),
        ({"model": {"compute_dtype": "bf16"}}, ADAPTIVE, "is bf16, .* needs no loss scaling"),
        ({}, 65535, "'training.loss_scale' must be .*power of two, but got 65535"),
        (
            {},
            {**ADAPTIVE, "loss_scale_value": 65535},
            "'training.loss_scale.loss_scale_value' must .*power of two.* 65535",
        ),
    ],
)
def test_a_format_or_start_that_does_not_fit_is_warned_of(config, section, message):
    with pytest.warns(UserWarning, match=message):
        check_config(config, section)


@pytest.mark.parametrize(
    ("config", "section"),
    [
        ({"model": {"compute_dtype": "float16"}}, ADAPTIVE),
        ({"model": {"compute_dtype": "float16"}}, 1.0),
        ({"model": {"compute_dtype": "bfloat16"}}, None),
        ({"model": {"compute_dtype": "bfloat16"}}, 1.0),
        ({}, None),
    ],
)
def test_a_format_that_fits_is_not_warned_of(config, section):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_config(config, section)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"parallelism": {"pipeline_parallel": 2}},
            "'parallelism.pipeline_parallel' must be 1 .* is 2: .*data or tensor parallelism",
        ),
        ({"callbacks": [{"type": "GradientRangeMonitor"}]}, "'callbacks.0.type' must be .* GradientRangeMonitor works"),
    ],
)
def test_what_does_not_go_with_the_section_is_refused(config, message):
    check_config(config, None)
    with pytest.raises(ValueError, match=message):
        check_config(config, ADAPTIVE)


@pytest.mark.parametrize(
    ("config", "scaler", "error", "message"),
    [
        (
            {"training": {}},
            None,
            ValueError,
            "'training.loss_scale' in 'config' or from 'loss_scaler', but got neither",
        ),
        ({"training": {"loss_scale": 1.0}}, AdaptiveLossScaler(2.0), ValueError, "but got both. Give exactly one"),
        ({"training": {}}, 1024, TypeError, "'loss_scaler' must be .*got int.*AdaptiveLossScaler"),
        ({"training": {"loss_scale": "x"}}, None, TypeError, "'training.loss_scale' must be a section .*got 'x'"),
    ],
)
def test_trainer_checks_where_its_scale_comes_from_first(config, scaler, error, message):
    with pytest.raises(error, match=message):
        LossScaledTraining(config, loss_scaler=scaler)


@pytest.fixture
def file(tmp_path):
    """Write a YAML file for the PyNative trainer, and return its path."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"training": {"steps": 3, "loss_scale": ADAPTIVE}, "context": {"mode": 1}}))
    return path


def test_the_launcher_loads_a_file_and_sets_keys_of_the_section(file):
    keys = {"training.loss_scale.scale_window": 50, "training.steps": 5, "context.device_target": "CPU"}
    with pytest.warns(UserWarning, match=r"'context.device_target' was not in .*; it is added"):
        config = pynative_launcher.load_config(file, keys)
    assert config["training"] == {"steps": 5, "loss_scale": ADAPTIVE | {"scale_window": 50}}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"do_eval": True}, "'do_eval' is a key .*graph-mode trainer, .*--options"),
        ({"run_mode": "predict"}, "'run_mode' must be train .*got 'predict'"),
        ({"training.loss_scale.scale_factor": 0.5}, "'training.loss_scale': 'scale_factor' must be"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*it is added")
def test_launcher_refuses_keys_of_the_other_trainer(file, overrides, message):
    with pytest.raises(ValueError, match=message):
        pynative_launcher.load_config(file, overrides, may_add=["runner_config.batch_size", "do_eval", "run_mode"])


def test_commands_for_the_graph_mode_trainer_say_so(file):
    with pytest.raises(ValueError, match=r"must be for MindFormers' graph-mode .* has the section 'training'"):
        launcher.load_config(file)
    assert pynative_launcher.is_for(file)
    file.write_text("training: {steps: [")
    assert not pynative_launcher.is_for(file)


@pytest.mark.skipif(not BEFORE_2, reason="this MindFormers has the trainer")
def test_an_older_mindformers_is_named_with_what_to_do(run_program, file):
    with pytest.raises(ImportError, match=r"needs MindFormers 2\.0\.0 .*is MindFormers 1\..*Install MindFormers 2"):
        stock_trainer()
    code, _, errors = run_program("train", "--config", str(file))
    assert (code, "needs MindFormers 2.0.0" in errors) == (1, True)


@pytest.mark.skipif(BEFORE_2, reason="this MindFormers has no such trainer")
def test_without_hyper_parallel_that_is_said():
    with pytest.raises(ImportError, match=r"PyNative trainer needs hyper_parallel.*not installed"):
        stock_trainer()

"""Mistakes in a YAML file or in ``TrainingArguments`` are named before anything is built."""

import inspect
import re
import resource
import warnings

import pytest
import yaml
from conftest import ROOT
from examples.tiny_llama import build_model
from mindformers import TrainingArguments
from mindformers.core.callback import MFLossMonitor
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

from mindformers_adaptive.integration.launcher import load_config
from mindformers_adaptive.integration.trainer import Trainer
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell

CONFIG = ROOT / "configs" / "tiny_llama_cpu_fp16.yaml"
SCALE_SENSE = "runner_wrapper.scale_sense"
COMPLETE = {"type": "AdaptiveLossScaleUpdateCell", "loss_scale_value": 1024, "scale_factor": 2, "scale_window": 20}

pytestmark = pytest.mark.usefixtures("registry_put_back")


def load(changes):
    """Load the YAML file of the demo with other values."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*it is added")
        return load_config(CONFIG, changes)


EPOCHS, NORM, CLIP = "runner_config.epochs", "runner_wrapper.max_grad_norm", "runner_wrapper.use_clip_grad"
SINK = "runner_config.sink_mode"
DROPS, PER_TOKEN = "use_skip_data_by_global_norm", "calculate_per_token_loss"
# changes of the YAML file, error, message
MISTAKES = [
    (
        {"runner_wrapper.use_clip_gard": True},
        TypeError,
        "MFTrainOneStepCell takes, but got 'use_clip_gard'.*'use_clip_g",
    ),
    ({f"{SCALE_SENSE}.max_scale_windows": 5}, TypeError, "Adaptive.* but got 'max_scale_windows'.*'max_scale_window'"),
    ({f"{SCALE_SENSE}.xyz": 5}, TypeError, "but got 'xyz'. It takes history_size, hysteresis, "),
    ({f"{SCALE_SENSE}.type": "DynamicLossScaleUpdateCell"}, TypeError, "Dynamic.*'m.._scale_window'.*It takes loss"),
    ({f"{SCALE_SENSE}.type": "AdaptivLossScaleUpdateCell"}, ValueError, "'Adaptiv.*mean 'AdaptiveLossScaleUpdateCell'"),
    (
        {"runner_wrapper.type": "MFTrainOneStep"},
        ValueError,
        "'runner_wrapper.type'.*'MFTrainOneStep'.*'MFTrainOneStepC",
    ),
    ({"runner_wrapper.type": "TrainOneStepWithLossScaleCell"}, TypeError, "got 'TrainOne.*Use MFTrainOneStepCell"),
    ({"optimizer.type": "AdamWW"}, ValueError, "'optimizer.type'.*'AdamWW'.*'AdamW'"),
    ({"lr_schedule.type": "CosineWithWarmupLR"}, ValueError, "'lr_schedule.type'.*mean 'CosineWithWarmUpLR'"),
    ({"callbacks.2.type": "LossScaleMonitr"}, ValueError, "'callbacks.2.type'.*'LossScaleMonitr'.*'LossScaleMonitor'"),
    ({"callbacks.2.max_consecutive_overflow": 9}, TypeError, "'callbacks.2'.*mean 'max_consecutive_overflows'"),
    ({"callbacks.1.save_checkpoint_step": 9}, TypeError, "CheckpointMonitor takes.*mean 'save_checkpoint_steps'"),
    ({SCALE_SENSE: {"loss_scale_value": 1024}}, TypeError, "must have a 'type', but has only loss_scale_value"),
    ({SCALE_SENSE: "AdaptiveLossScaleUpdateCell"}, TypeError, "must be a section or a number, but got the text"),
    ({SCALE_SENSE: {**COMPLETE, "scale_facto": 2}}, TypeError, "but got 'scale_facto'.*'scale_factor'"),
    (
        {SCALE_SENSE: {"type": COMPLETE["type"], "loss_scale_value": 2}},
        TypeError,
        "lacks scale_factor, scale_window.*them",
    ),
    ({EPOCHS: 0}, ValueError, f"'{EPOCHS}' must be at least 1, but got 0"),
    ({EPOCHS: "2"}, TypeError, f"'{EPOCHS}' must be an integer, but got '2'"),
    ({NORM: "1.0"}, TypeError, f"'{NORM}' must be a finite number above 0, but got '1.0'"),
    ({NORM: -1}, ValueError, f"'{NORM}' must be a finite number above 0.* but got -1"),
    ({CLIP: "False"}, TypeError, f"'{CLIP}' must be True or False, but got 'False'"),
    ({SINK: "False"}, TypeError, f"'{SINK}' must be True or False, but got 'False'"),
    ({"use_parallel": "no"}, TypeError, "'use_parallel' must be True or False, but got 'no'"),
    ({DROPS: True, CLIP: False}, ValueError, f"'{DROPS}' must come with 'runner_wrapper.use_clip_grad: True'"),
    ({DROPS: 1}, TypeError, f"'{DROPS}' must be True or False, but got 1"),
    ({"monitor_config": {"global_norm_spike_threshold": 3}}, TypeError, "must be a float, but got 3.*as in 3.0"),
    (
        {DROPS: True, "monitor_config": {"monitor_on": True, "check_for_global_norm": True}},
        ValueError,
        f"'{DROPS}' must not be True beside 'monitor_config.check_for_global_norm'",
    ),
    ({"resume_training": "true"}, TypeError, "'resume_training' must be True, False or the name .* text 'true'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), MISTAKES, ids=[next(iter(row[0])) for row in MISTAKES])
def test_a_mistake_is_named_with_its_key_and_the_remedy(changes, error, message):
    load({})
    with pytest.raises(error, match=message):
        load(changes)


TAKES_ANYTHING = pytest.mark.skipif(
    "kwargs" not in inspect.signature(MFLossMonitor.__init__).parameters,
    reason="MFLossMonitor of this version of MindFormers takes no further arguments",
)


@pytest.mark.parametrize(
    "changes",
    [
        {SCALE_SENSE: 1024},
        {SCALE_SENSE: 1024.0},
        {SCALE_SENSE: {"type": "FixedLossScaleUpdateCell", "loss_scale_value": 1024}},
        {SCALE_SENSE: {**COMPLETE, "auto_register": "my_cells.MyUpdateCell", "type": "MyUpdateCell", "mine": 1}},
        {SCALE_SENSE: {**COMPLETE, "auto_register": "adaptive_loss_scaling.AdaptiveLossScaleUpdateCell"}},
        {"runner_wrapper.type": "mf_wrapper"},
        {"runner_wrapper.type": "MFPipelineWithLossScaleCell", "runner_wrapper.micro_batch_num": 4},
        {"runner_wrapper.micro_batch_num": 4},
        {"runner_wrapper.max_grad_norm": 1},
        pytest.param({"callbacks.0.anything": 1}, marks=TAKES_ANYTHING),
        {"callbacks.0": {"type": "SummaryMonitor", "keep_default_action": True}},
        {"resume_training": "last.ckpt"},
        {"run_mode": "predict", "runner_config.epochs": 0},
        {DROPS: True, "monitor_config": {"global_norm_spike_threshold": 3.0}},
        # The demo has 8 * 128 tokens a batch.
        {PER_TOKEN: True, f"{SCALE_SENSE}.loss_scale_value": 2**22},
        {PER_TOKEN: True, "resume_training": True},
        {PER_TOKEN: True, SCALE_SENSE: {"type": "GradientGuidedLossScaleUpdateCell", "loss_scale_value": 2**32}},
    ],
    ids=str,
)
def test_what_mindformers_accepts_is_accepted(changes):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load(changes)


@pytest.mark.parametrize(("accumulated", "bits"), [(1, 10), (4, 12)])
def test_a_high_start_with_a_loss_per_token_is_advised_to_ask_find(accumulated, bits):
    changes = {PER_TOKEN: True, "runner_config.gradient_accumulation_steps": accumulated}
    message = rf"lower by log2\({2**bits}\) = {bits} bits.* from 2\^32 skips about {bits} .*adaptive-loss-scale find"
    with pytest.warns(UserWarning, match=message):
        load(changes)


def test_the_module_of_register_path_is_checked_like_the_class_it_registers():
    section = {**COMPLETE, "auto_register": "adaptive_loss_scaling.AdaptiveLossScaleUpdateCell", "hysteresys": 2}
    with pytest.raises(TypeError, match=r"'hysteresys'.*'hysteresis'"):
        load({SCALE_SENSE: section})


class MyUpdateCell(AdaptiveLossScaleUpdateCell):
    """Takes an argument of its own, and passes the others on."""

    def __init__(self, *args, patience=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.patience = patience


class MyTrainStep(MFTrainOneStepCell):
    """Takes out of ``kwargs`` what it needs."""

    def __init__(self, network, optimizer, **kwargs):
        self.mine = kwargs.pop("something_else", None)
        super().__init__(network, optimizer, **kwargs)


def test_classes_of_users_keep_working_and_a_doubtful_key_is_warned_of():
    load({})
    for cls in (MyUpdateCell, MyTrainStep):
        MindFormerRegister.register_cls(cls, MindFormerModuleType.WRAPPER)
    mine = {"runner_wrapper.type": "MyTrainStep", SCALE_SENSE: {**COMPLETE, "type": "MyUpdateCell", "patience": 2}}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load({**mine, "runner_wrapper.something_else": 1, f"{SCALE_SENSE}.hysteresis": 2})
    with pytest.warns(UserWarning, match="MyTrainStep takes, but got 'use_clip_gard'.*'use_clip_grad'.* passed on"):
        load({**mine, "runner_wrapper.use_clip_gard": True})


def test_an_unknown_key_of_another_section_is_named_with_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    content = yaml.safe_load(CONFIG.read_text())
    content["runner_config"]["epoks"] = 2
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=rf"{file}: The config 'runner_config' gets an unexpected key: epoks"):
        load_config(file)


def trainer(**arguments):
    """A Trainer from ``TrainingArguments``."""
    return Trainer(TrainingArguments(**{"output_dir": "output", "sink_mode": False, **arguments}), model=build_model())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_train_epochs": 0}, ValueError, "'runner_config.epochs' must be at least 1"),
        ({"max_grad_norm": "1.0"}, TypeError, "'runner_wrapper.max_grad_norm' must be a finite number"),
        ({"use_clip_grad": "False"}, TypeError, "'runner_wrapper.use_clip_grad' must be True or False"),
        ({"scale_sense": "AdaptivLossScaleUpdateCell"}, ValueError, "mean 'AdaptiveLossScaleUpdateCell'"),
        ({"wrapper_type": "MFTrainOneStepCel"}, ValueError, "mean 'MFTrainOneStepCell'"),
    ],
)
def test_trainer_makes_the_same_checks(tmp_path, monkeypatch, arguments, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        trainer(**arguments)


@pytest.mark.parametrize(
    ("window", "expected"),
    [({}, 20), ({"min_scale_window": 5, "max_scale_window": 300}, 5), ({"loss_scale_window": 50}, 50)],
)
def test_training_starts_at_the_smallest_window_if_the_user_gave_none(tmp_path, monkeypatch, window, expected):
    monkeypatch.chdir(tmp_path)
    arguments = {"scale_sense": "AdaptiveLossScaleUpdateCell", "loss_scale_value": 2**24, **window}
    config = trainer(**arguments).config
    section = {key: value for key, value in config.runner_wrapper.scale_sense.items() if key != "type"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cell = AdaptiveLossScaleUpdateCell(**section)
    assert (cell.state()["scale_window"], cell.get_loss_scale()) == (expected, 2**24)


def test_the_window_of_another_cell_is_that_of_the_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert trainer(scale_sense="DynamicLossScaleUpdateCell").config.runner_wrapper.scale_sense.scale_window == 1000


def test_the_launcher_answers_within_13_seconds_without_a_traceback(run_python):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    options = ["--config", CONFIG, "--options", f"{SCALE_SENSE}.max_scale_windows=5"]
    printed = run_python(ROOT / "scripts" / "run_mindformer.py", *options, expect_exit=1).stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of a core, because other tests may run beside it.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 13
    assert re.search("train: error: .*'max_scale_windows'.*mean 'max_scale_window'", printed)
    assert "Traceback" not in printed

"""Before training, mistakes in YAML and settings that a CPU cannot run raise errors that name the key and a remedy."""

import contextlib
import functools
import re
import warnings

import numpy as np
import pytest
import yaml
from mindformers.core.optim import AdamW
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Parameter, Tensor, nn

from mindformers_adaptive.cells.compiled_update import CompiledUpdateCell
from mindformers_adaptive.mindformers.configuration_check import check_config
from mindformers_adaptive.mindformers.launcher import load_config
from mindformers_adaptive.mindformers.trainer import LaunchedTrainer, Trainer
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell
from tests.conftest import CONFIG
from tests.mindformers.trained_llama import build_dataset, build_model
from tests.mindformers.training_runs import training_arguments
from tests.shared.versions import BEFORE_2

SCALE_SENSE = "runner_wrapper.scale_sense"
COMPLETE = {"type": "AdaptiveLossScaleUpdateCell", "loss_scale_value": 1024, "scale_factor": 2, "scale_window": 20}
GUIDED = {"type": "GradientGuidedLossScaleUpdateCell", "loss_scale_value": 2**32}
AUTO_REGISTER = "adaptive_loss_scaling.AdaptiveLossScaleUpdateCell"

pytestmark = pytest.mark.usefixtures("registry_put_back", "in_a_folder_of_its_own")


def load(changes):
    """Load the demo's YAML file with changes; warnings are errors, except about added keys and missing scaling."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(it is added|needs no loss scaling|loss is not scaled)")
        return load_config(CONFIG, changes)


TYPE = "runner_wrapper.type"
EVERY, RULE = "callbacks.2.every_n_steps", "RuleLossScaleUpdateCell"
BY_RULE = {"type": RULE, "loss_scale_value": 1024}
DYNAMIC, RANGES = {**COMPLETE, "type": "DynamicLossScaleUpdateCell"}, {"type": "GradientRangeMonitor"}
FIXED = {"type": "FixedLossScaleUpdateCell", "loss_scale_value": 1024}
PER_TOKEN = "calculate_per_token_loss"
# Invalid changes to the demo's YAML file, each with a pattern that this package's error message must match.
WRONG_TYPES = [
    ({"runner_wrapper.use_clip_gard": True}, "MFTrainOneStepCell takes, but got 'use_clip_gard'.*'use_clip_g"),
    ({f"{SCALE_SENSE}.max_scale_windows": 5}, "Adaptive.* but got 'max_scale_windows'.*'max_scale_window'"),
    ({f"{SCALE_SENSE}.xyz": 5}, "but got 'xyz'. It takes backoff_factor, history_size, "),
    ({f"{SCALE_SENSE}.type": "DynamicLossScaleUpdateCell"}, "Dynamic.*'m.._scale_window'.*It takes loss"),
    ({TYPE: "TrainOneStepWithLossScaleCell"}, "got 'TrainOne.*Use MFTrainOneStepCell"),
    ({"callbacks.2.max_consecutive_overflow": 9}, "'callbacks.2'.*mean 'max_consecutive_overflows'"),
    ({SCALE_SENSE: {"loss_scale_value": 1024}}, "must have a 'type', but has only loss_scale_value"),
    ({SCALE_SENSE: {}}, "must have a 'type', but has no keys. Add"),
    ({SCALE_SENSE: {"type": None}}, "must have a 'type', but the 'type' is empty. Add"),
    ({SCALE_SENSE: "AdaptiveLossScaleUpdateCell"}, "must be a section or .*got the text 'Adaptive.* leave the key out"),
    ({SCALE_SENSE: {**COMPLETE, "auto_register": AUTO_REGISTER, "hysteresys": 2}}, "'hysteresys'.*'hysteresis'"),
    ({SCALE_SENSE: {"type": COMPLETE["type"], "loss_scale_value": 2}}, "lacks scale_factor, scale_window.*them"),
    ({SCALE_SENSE: {**GUIDED, "exchange_rate": 1}}, "got 'exchange_rate'. Use 'margin' instead"),
    ({"resume_training": "true"}, "'resume_training' must be True.* the text 'true'. Write True"),
    ({"resume_training": 5}, "'resume_training' must be True.* got 5. Write True"),
    ({"callbacks.0.type": None}, "'callbacks.0.type' must be the name .*got None. Add 'type"),
    ({TYPE: 5}, "'runner_wrapper.type' must be the name .*got 5. Add 'type"),
    ({SCALE_SENSE: "dynamic"}, "got the text 'dynamic'. Write 'type: AdaptiveLossScale' below"),
    ({SCALE_SENSE: "2e16"}, "got the text '2e16'. .*plain number: YAML reads 2e16 as text"),
    ({f"{SCALE_SENSE}.loss_scale_value": "dynamic"}, "got 'dynamic' of type str. Give a number, such as"),
    ({f"{SCALE_SENSE}.loss_scale_value": "1e5"}, "'1e5' of type str. .*plain number: YAML reads"),
    ({SCALE_SENSE: [1]}, r"must be a section or .*got \[1\]. .*'loss_scale_value'"),
    ({SCALE_SENSE: None}, f"'{SCALE_SENSE}' must be a section or .*got None. .* leave the key out"),
    ({f"{SCALE_SENSE}.max_scale_window": 1.5}, "'max_scale_window' must be an integer .*got 1.5"),
    ({f"{SCALE_SENSE}.history_size": "x"}, "'history_size' must be an integer .*got 'x'"),
    ({EVERY: "x"}, "'callbacks.2': 'every_n_steps' must be an integer .*got 'x'"),
    ({"callbacks.2.max_consecutive_overflows": "None"}, "got .None. of type str. Give 1 or more; null, in Py"),
    ({SCALE_SENSE: {**BY_RULE, "rule": 5}}, f"'{SCALE_SENSE}': 'rule' must be .* but got 5"),
    ({"callbacks.2.record_path": 5}, "'callbacks.2': 'record_path' must be"),
    ({"callbacks.0.explian": True}, "'callbacks.0' must have keys that MFLossMonitor takes, but got 'explian'"),
    ({"callbacks": [{**RANGES, "loss_scales": "x"}]}, "'callbacks.0': 'loss_scales' must be a list .*got 'x'"),
]
WRONG_VALUES = [
    ({f"{SCALE_SENSE}.type": "AdaptivLossScaleUpdateCell"}, "'Adaptiv.*mean 'AdaptiveLossScaleUpdateCell'"),
    ({f"{SCALE_SENSE}.type": "TrainOneStepWithLossScaleCel"}, "'TrainOneStepWithLossScaleCel'.*'auto_register'"),
    ({TYPE: "TrainOneStepWithLossScaleCel"}, "'TrainOneStepWithLossScaleCel'. Use MFTrainOneStepCell"),
    ({SCALE_SENSE: {1: 2}}, f"'{SCALE_SENSE}' must be a section .*keys .*got .1: 2."),
    ({TYPE: "MFTrainOneStep"}, "'runner_wrapper.type'.*'MFTrainOneStep'.*'MFTrainOneStepC"),
    ({"callbacks.2.type": "LossScaleMonitr"}, "'callbacks.2.type' must name .* Did you mean 'LossScaleMonitor'"),
    ({"runner_wraper.scale_sense": 8}, "'runner_wraper' is not a key that MindFormers reads.*Write 'runner_wrapper'"),
    ({"resume_trainig": True}, "'resume_trainig' is not a key .*Write 'resume_training'"),
    ({SCALE_SENSE: -1}, f"'{SCALE_SENSE}' must be finite and above 0 in float32, but got -1"),
    ({f"{SCALE_SENSE}.loss_scale_value": -1}, f"'{SCALE_SENSE}': 'loss_scale_value' must be finite and above 0"),
    ({f"{SCALE_SENSE}.loss_scale_value": 10**400}, "'loss_scale_value' must be finite and above 0"),
    ({f"{SCALE_SENSE}.scale_factor": 1}, "'scale_factor' must be .*number above 1"),
    ({f"{SCALE_SENSE}.max_loss_scale": 0.5}, "'min_loss_scale' must not be above 'max_loss_scale'"),
    ({f"{SCALE_SENSE}.history_size": 10**9}, "'history_size' must be at most 1000000"),
    ({SCALE_SENSE: {**GUIDED, "margin": -1}}, f"'{SCALE_SENSE}': 'margin' must be at least 0"),
    ({SCALE_SENSE: {**BY_RULE, "rule": "none.Such"}}, f"'{SCALE_SENSE}': 'rule' must be .* 'none.Such' cannot be imp"),
    ({SCALE_SENSE: {**COMPLETE, "auto_register": "adaptive_scaling.A"}}, f"'{SCALE_SENSE}.auto_register' .* leave"),
    ({SCALE_SENSE: {**GUIDED, "scale_factor": 3}}, "'scale_factor' must be 2"),
    ({SCALE_SENSE: {**GUIDED, "type": RULE, "rule": "guided", "margin": -1}}, "'margin' must be"),
    ({EVERY: 0}, "'callbacks.2': 'every_n_steps' must be at least 1, but got 0"),
    ({"callbacks.2.on_collapse": "explode"}, "'callbacks.2': 'on_collapse' must be one of"),
    ({"callbacks": [{**RANGES, "loss_scales": [-1]}]}, "'callbacks.0': 'loss_scales' must be finite and above 0"),
]
MISTAKES = [
    *(pytest.param(changes, TypeError, message, id=next(iter(changes))) for changes, message in WRONG_TYPES),
    *(pytest.param(changes, ValueError, message, id=next(iter(changes))) for changes, message in WRONG_VALUES),
]


@pytest.mark.parametrize(("changes", "error", "message"), MISTAKES)
def test_a_mistake_is_named_with_its_key_and_the_remedy(changes, error, message):
    with pytest.raises(error, match=message):
        load(changes)


def test_no_update_cell_is_built_to_check_its_values(monkeypatch):
    monkeypatch.setattr(CompiledUpdateCell, "__init__", lambda *_: pytest.fail("a cell was built"))
    for section in (COMPLETE, GUIDED, BY_RULE | {"rule": "guided", "margin": 3}):
        load({SCALE_SENSE: section})


def test_callbacks_are_counted_as_in_the_file(tmp_path):
    content = yaml.safe_load(CONFIG.read_text())
    # MindFormers itself puts MFLossMonitor first.
    content["callbacks"] = [{"type": "LossScaleMonitor"}, {"type": "MFLossMonitor"}, {"type": "LossScaleMonitor"}]
    file = tmp_path / "monitor_first.yaml"
    file.write_text(yaml.safe_dump(content))
    config = load_config(file, {"callbacks.2.on_collapse": "stop", "callbacks.1.per_print_times": 7})
    assert [callback["type"] for callback in config.callbacks] == ["MFLossMonitor", *["LossScaleMonitor"] * 2]
    assert (config.callbacks[0]["per_print_times"], config.callbacks[2]["on_collapse"]) == (7, "stop")
    with pytest.raises(ValueError, match=r"'callbacks\.0': 'on_collapse' must be one of"):
        load_config(file, {"callbacks.0.on_collapse": "abort"})
    config = load_config(file, {"callbacks": [{"type": "LossScaleMonitor"}]})
    assert [callback["type"] for callback in config.callbacks] == ["LossScaleMonitor"]


def test_a_section_that_mindformers_does_not_read_is_warned_of():
    with pytest.warns(UserWarning, match="does not read the section 'my_model'"):
        load({"my_model.hidden_size": 64})
    load({"tensorboard": {"tensorboard_dir": "board"}, "seed": 1})


SEVERAL = [
    ({f"{SCALE_SENSE}.max_scale_windows": 5, f"{SCALE_SENSE}.histeresis": 2}, ["max_scale_window", "hysteresis"]),
    ({"runner_wrapper.use_clip_gard": True, f"{SCALE_SENSE}.scale_factr": 2}, ["use_clip_grad", "scale_factor"]),
    ({f"{SCALE_SENSE}.scale_factr": 2, "callbacks.2.on_colapse": "warn"}, ["scale_factor", "on_collapse"]),
    ({"callbacks.2.on_colapse": "warn", "callbacks.2.every_n_step": 2}, ["on_collapse", "every_n_steps"]),
    ({"callbacks.0.type": "MFLossMonitr", f"{SCALE_SENSE}.scale_factr": 2}, ["MFLossMonitor", "scale_factor"]),
    ({SCALE_SENSE: {**BY_RULE, "rule": "guided", "exchang_rate": 1, "hysteres": 2}}, ["exchang_rate", "hysteres"]),
]


@pytest.mark.parametrize(("changes", "names"), SEVERAL, ids=str)
def test_all_wrong_keys_are_named_at_once(changes, names):
    with pytest.raises((TypeError, ValueError)) as error:
        load(changes)
    assert all(f"'{name}'" in str(error.value) for name in names)
    wrong = [key.rpartition(".")[2] for key in changes if not key.endswith((".type", "scale_sense"))]
    assert all(f"'{key}'" in str(error.value) for key in wrong)


def test_loss_scales_may_be_written_as_powers_of_two():
    assert load({SCALE_SENSE: "2**3"}).runner_wrapper.scale_sense == 8.0
    for section in (FIXED, DYNAMIC, COMPLETE | {"min_loss_scale": "2^-3", "max_loss_scale": "2^24"}):
        callbacks = [{**RANGES, "loss_scales": ["2^0", "2^8", 3]}]
        config = load({SCALE_SENSE: {**section, "loss_scale_value": "2^16"}, "callbacks": callbacks})
        assert config.runner_wrapper.scale_sense["loss_scale_value"] == 65536.0
        assert config.callbacks[0]["loss_scales"] == [1.0, 256.0, 3]
    assert config.runner_wrapper.scale_sense.min_loss_scale == 0.125
    assert config.runner_wrapper.scale_sense["max_loss_scale"] == 2.0**24
    with pytest.raises(ValueError, match="too large"):
        load({f"{SCALE_SENSE}.loss_scale_value": "2^2000"})


def test_numeric_key_in_the_file_is_refused():
    config = load({})
    config.runner_wrapper.scale_sense[7] = 8
    with pytest.raises(TypeError, match=f"'{SCALE_SENSE}' must have keys that Adaptive.* takes, but got '7'"):
        check_config(config)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {SCALE_SENSE: 1024},
        {SCALE_SENSE: 1024.0},
        {SCALE_SENSE: FIXED},
        {SCALE_SENSE: {**COMPLETE, "auto_register": "my_cells.MyUpdateCell", "type": "MyUpdateCell", "mine": 1}},
        {SCALE_SENSE: {**COMPLETE, "auto_register": AUTO_REGISTER}},
        {SCALE_SENSE: {**GUIDED, "type": "GradientGuidedLossScale", "margin": 2}},
        {TYPE: "mf_wrapper"},
        {TYPE: "MFPipelineWithLossScaleCell", "runner_wrapper.micro_batch_num": 4},
        {"runner_wrapper.micro_batch_num": 4},
        {"runner_wrapper.max_grad_norm": 1},
        {"resume_training": "last.ckpt"},
        {"run_mode": "predict", f"{SCALE_SENSE}.loss_scale_value": 0},
        # A batch of the demo training has 8 * 128 tokens.
        {PER_TOKEN: True, f"{SCALE_SENSE}.loss_scale_value": 2**22},
        {PER_TOKEN: True, "resume_training": True},
        {PER_TOKEN: True, SCALE_SENSE: GUIDED},
        # A CPU can run the settings below. MindFormers ignores pipeline_stage, because use_parallel is not set.
        {"monitor_config": {"monitor_on": True, "dump_path": "", "local_norm_format": ["log"]}},
        {"monitor_config": {"monitor_on": False, "dump_path": "./dump"}},
        {"parallel.parallel_mode": 1, "parallel_config.pipeline_stage": 2},
        {"use_parallel": True, "parallel_config.data_parallel": 2},
    ],
    ids=str,
)
def test_what_mindformers_accepts_is_accepted(changes, monkeypatch):
    monkeypatch.setenv("REGISTER_PATH", "folder_of_my_cells")
    load(changes)


def test_checkpoint_section_in_pynative_needs_hyper_parallel():
    message = "'context.mode' must be 0 .* hyper-parallel, .*not installed"
    with contextlib.nullcontext() if BEFORE_2 else pytest.raises(ValueError, match=message):
        load({"context.mode": 1, "checkpoint.save_path": "saved"})
    load({"context.mode": 0, "checkpoint.save_path": "saved"})
    load({"context.mode": 1})


ODD, BY_NAME = {"loss_scale_value": 65535}, {"type": RULE, "rule": "adaptive"}


@pytest.mark.parametrize(
    "scale_sense", [65535, FIXED | ODD, COMPLETE | ODD, BY_RULE | {"rule": "adaptive"} | ODD], ids=str
)
def test_a_start_that_is_no_power_of_two_is_warned_of(scale_sense):
    message = "scale_sense.* must be a power .*got 65535.* is 65536"
    with pytest.warns(UserWarning, match=message) as caught:
        load({SCALE_SENSE: scale_sense})
    assert len(caught) == 1
    # The guided rule's update cell rounds its initial loss scale down to a power of two. The cell warns of this itself,
    # so loading the YAML file gives no warning.
    load({SCALE_SENSE: {**GUIDED, **ODD}})


@pytest.mark.parametrize(
    ("dtype", "scale_sense", "message"),
    [
        *(
            (dtype, cell, f"compute_dtype' is {dtype}.* needs no loss .* of type {cell['type']}.*'scale_sense: 1.0'")
            for dtype in ("bfloat16", "bf16")
            for cell in (DYNAMIC, COMPLETE, GUIDED)
        ),
        *(
            (dtype, None, f"compute_dtype' is {dtype}, .* become 0, .*no '{SCALE_SENSE}'.*'scale_sense: 1.0'")
            for dtype in ("float16", "fp16", "mindspore.float16")
        ),
        ("float16", COMPLETE, None),
        ("float16", 1.0, None),
        ("float32", None, None),
        ("bfloat16", FIXED, None),
        ("bfloat16", 1.0, None),
        (None, None, None),
    ],
)
def test_a_format_and_a_scale_that_do_not_fit_get_one_warning(dtype, scale_sense, message):
    section = {} if scale_sense is None else {"scale_sense": scale_sense}
    config = load({"runner_wrapper": {"type": "MFTrainOneStepCell", **section}})
    # On a CPU, a file with bfloat16 cannot be loaded. So set the type afterwards.
    config.model.model_config.compute_dtype = dtype
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_config(config)
    assert len(caught) == (message is not None)
    assert all(re.search(message, str(warning.message)) for warning in caught)


def test_launcher_and_trainer_warn_of_unscaled_float16():
    with pytest.warns(UserWarning, match="the loss is not scaled"):
        config = load_config(CONFIG, {"runner_wrapper": {"type": "MFTrainOneStepCell"}})
    with pytest.warns(UserWarning, match="the loss is not scaled"):
        Trainer(config)
    # load_config() has already warned, so the launcher's trainer must not warn again. A second warning would fail this
    # test.
    LaunchedTrainer(config)
    # A train-step cell that the user has built brings its own loss scale, so there is no warning.
    model = build_model()
    Trainer(config, wrapper=MFTrainOneStepCell(model, nn.SGD(model.trainable_params()), scale_sense=Tensor(8.0)))


@pytest.mark.parametrize(
    ("optimizer", "of_state"),
    [
        ({}, "at any loss scale. Training"),
        ({"optimizer.type": "Adam"}, "'optimizer.type' is Adam, .* second moments. AdamW keeps"),
        ({"optimizer.type": "AdamWeightDecay"}, "eps becomes 0 in float16, .*NaN. AdamW"),
        # The largest eps of an optimizer that float16 rounds to 0.
        ({"optimizer.type": "AdamWeightDecay", "optimizer.eps": 2.0**-25}, "eps becomes 0 in float16"),
        ({"optimizer.type": "AdamWeightDecay", "optimizer.eps": 1e-6}, "second moments. AdamW keeps"),
    ],
)
def test_weights_in_float16_get_one_warning(optimizer, of_state):
    text = f"param_init_type' is float16: .* below 1/4096 .*{of_state}.* Set '.*param_init_type' to float32"
    with pytest.warns(UserWarning, match=text) as caught:
        load({f"{MODEL}.param_init_type": "float16", **optimizer})
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("make_optimizer", "state", "underflows", "makes_nan"),
    [
        (functools.partial(nn.AdamWeightDecay, eps=1e-8), "Float16", True, True),
        (functools.partial(nn.AdamWeightDecay, eps=1e-6), "Float16", True, False),
        (functools.partial(nn.Adam, eps=1e-8), "Float16", True, False),
        (functools.partial(AdamW, eps=1e-8), "Float32", False, False),
    ],
    ids=["AdamWeightDecay", "AdamWeightDecay with a larger eps", "Adam", "AdamW"],
)
def test_the_warning_of_weights_in_float16_is_true(graph_mode, make_optimizer, state, underflows, makes_nan):
    weight = Parameter(Tensor(np.full(2, 0.5, np.float16)), name="weight")
    optimizer = make_optimizer([weight], 1e-2)
    optimizer((Tensor(np.array([0.0, 1e-4], np.float16)),))
    [squares] = [each for each in optimizer.get_parameters() if each.name in ("adam_v.weight", "moment2.weight")]
    assert (str(squares.dtype), squares.asnumpy()[1] == 0) == (state, underflows)
    assert np.isnan(weight.asnumpy()[0]) == makes_nan


def test_updates_below_a_share_of_a_weight_in_float16_are_lost():
    # All FP16 numbers from 2^-13 up to 1.
    weights = np.arange(0x0800, 0x3C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    assert ((weights * (1 + 2.0**-12.01)).astype(np.float16) == weights).all()
    assert ((weights * (1 + 2.0**-10.99)).astype(np.float16) > weights).all()


class MyUpdateCell(AdaptiveLossScaleUpdateCell):
    """A user's update cell with an argument of its own, which passes all other arguments to its parent class."""

    def __init__(self, *args, patience=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.patience = patience


class MyTrainStep(MFTrainOneStepCell):
    """A user's train-step cell that takes an argument of its own out of ``kwargs``."""

    def __init__(self, network, optimizer, **kwargs):
        self.mine = kwargs.pop("something_else", None)
        super().__init__(network, optimizer, **kwargs)


def test_users_classes_work_and_a_doubtful_key_warns():
    load({})
    for cls in (MyUpdateCell, MyTrainStep):
        MindFormerRegister.register_cls(cls, MindFormerModuleType.WRAPPER)
    mine = {TYPE: "MyTrainStep", SCALE_SENSE: {**COMPLETE, "type": "MyUpdateCell", "patience": 2}}
    load({**mine, "runner_wrapper.something_else": 1, f"{SCALE_SENSE}.hysteresis": 2})
    with pytest.warns(UserWarning, match="MyTrainStep takes, but got 'use_clip_gard'.*'use_clip_grad'.* passed"):
        load({**mine, "runner_wrapper.use_clip_gard": True})


def test_unknown_key_of_another_section_is_named_with_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    content = yaml.safe_load(CONFIG.read_text())
    content["runner_config"]["epoks"] = 2
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=rf"{file}: The config 'runner_config' gets an unexpected key: epoks"):
        load_config(file)


def trainer(model=None, dataset=None, **arguments):
    """Return a Trainer made from ``TrainingArguments``."""
    return Trainer(training_arguments(**arguments), model=model or build_model(), train_dataset=dataset)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scale_sense": "AdaptivLossScaleUpdateCell"}, ValueError, "mean 'AdaptiveLossScaleUpdateCell'"),
        ({"wrapper_type": "MFTrainOneStepCel"}, ValueError, "mean 'MFTrainOneStepCell'"),
        ({"scale_sense": "DynamicLossScaleUpdateCell", **ODD}, UserWarning, "got 65535.* near it is 65536"),
    ],
)
def test_trainer_makes_the_same_checks(arguments, error, message):
    with pytest.raises(error, match=message):
        trainer(**arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, 20),
        ({"min_scale_window": 5, "max_scale_window": 300}, 5),
        ({"loss_scale_window": 50}, 50),
        # DynamicLossScaleUpdateCell has no smallest window, so its training starts with the default of the training
        # arguments.
        ({"scale_sense": "DynamicLossScaleUpdateCell"}, 1000),
    ],
)
def test_training_starts_at_the_smallest_window_by_default(arguments, expected):
    config = trainer(**{"scale_sense": "AdaptiveLossScaleUpdateCell", "loss_scale_value": 2**24, **arguments}).config
    section = dict(config.runner_wrapper.scale_sense)
    assert (section["scale_window"], section["loss_scale_value"]) == (expected, 2**24)
    if section.pop("type") == "AdaptiveLossScaleUpdateCell":
        # The scale window is on the cell's window ladder, so the cell gives no warning.
        assert AdaptiveLossScaleUpdateCell(**section).state()["scale_window"] == expected


MODEL = "model.model_config"
PARALLEL = {"use_parallel": True}
DUMP = {"monitor_config": {"monitor_on": True, "dump_path": "./dump"}}
# Settings of the YAML file that this package refuses on a CPU, and patterns of its error messages.
REFUSED_ON_CPU = [
    ({f"{MODEL}.use_flash_attention": True}, "use_flash_attention' must be False, .*is True: .*FlashAttentionScore"),
    ({f"{MODEL}.fused_rms_norm": True}, "fused_rms_norm' must be False, .*is True: .*RmsNorm"),
    ({f"{MODEL}.use_rope_slice": False}, "use_rope_slice' must be True, .*is False"),
    ({f"{MODEL}.compute_dtype": "bfloat16"}, "compute_dtype' must be another type, .*bfloat16. Set it to float16"),
    ({f"{MODEL}.param_init_type": "bfloat16"}, "param_init_type' must be another type, .*bfloat16"),
    ({f"{MODEL}.layernorm_compute_type": "bfloat16"}, "layernorm_compute_type' must be another type"),
    ({"moe_config": {"expert_num": 4}}, "'moe_config.expert_num' must be 1, but is 4"),
    ({"use_legacy": False}, "'use_legacy' must be True, .*is False: .*mcore .*mindformers.models.llama"),
    ({**PARALLEL, "parallel.parallel_mode": 1}, r"'parallel.parallel_mode' must be 0 \(data parallel\), but is 1"),
    ({**PARALLEL, "parallel.parallel_mode": "auto_parallel"}, "parallel_mode' must be 0 .*, but is auto_parallel"),
    ({**PARALLEL, "parallel_config.pipeline_stage": 2}, "'parallel_config.pipeline_stage' must be 1, but is 2"),
    ({**PARALLEL, "parallel_config.model_parallel": 4}, "'parallel_config.model_parallel' must be 1, but is 4"),
    ({**PARALLEL, "parallel_config.context_parallel": 2}, "'parallel_config.context_parallel' must be 1, but is 2"),
    ({**PARALLEL, "parallel_config.expert_parallel": 2}, "'parallel_config.expert_parallel' must be 1, but is 2"),
    (
        {**PARALLEL, "parallel_config.data_parallel": 2, "checkpoint.save_path": "saved"},
        "'checkpoint' must be left out .*processes: .* CheckpointMonitor",
    ),
    (DUMP, "dump_path' must be '', but is './dump'"),
    ({"optimizer.type": "Lamb"}, "'optimizer.type' must be another optimizer, .*Lamb. Set it to AdamW"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_ON_CPU, ids=[[*row[0]][-1] for row in REFUSED_ON_CPU])
def test_what_a_cpu_cannot_do_is_refused_only_there(changes, message):
    with pytest.raises(ValueError, match=rf"^This .*cannot .* on a CPU:\n- '.*{message.lstrip(chr(39))}"):
        load(changes)
    load({"context.device_target": "Ascend", **changes})


def test_all_that_a_cpu_cannot_do_is_named_at_once():
    with pytest.raises(ValueError, match=r"use_flash_attention(.|\n)*compute_dtype(.|\n)*monitor_config.dump_path"):
        load({f"{MODEL}.use_flash_attention": True, f"{MODEL}.compute_dtype": "bfloat16", **DUMP})


def test_key_missing_in_the_file_has_the_models_default(tmp_path):
    text = CONFIG.read_text(encoding="utf-8").replace("    fused_rms_norm: False\n", "")
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"fused_rms_norm' must be False, .*is True"):
        load_config(tmp_path / "my.yaml")


def test_trainer_looks_at_the_model_that_it_is_given():
    model = build_model()
    model.config.use_flash_attention = True
    with pytest.raises(ValueError, match=r"use_flash_attention' must be False, .*is True"):
        trainer(model, build_dataset().take(1)).train()

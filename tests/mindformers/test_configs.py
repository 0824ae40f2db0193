"""Every YAML file under configs/ loads with the launcher, and this package's cells get the values in the file."""

import inspect

import mindspore
import pytest
from mindformers.core.context.parallel import ParallelOperator
from mindformers.core.parallel_config import build_parallel_config
from mindformers.models.llama import LlamaConfig
from mindformers.tools.check_rules import check_rules
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

from mindformers_adaptive import wrapper
from mindformers_adaptive.mindformers.launcher import load_config
from tests.conftest import ROOT
from tests.mindformers.training_runs import build_train_step

FOLDER = ROOT / "configs"
FILES = sorted(file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("*.yaml"))

DEFAULT_LADDER = (20, 30, 40, 50, 100, 200, 500, 1000)
PRETRAIN = "ascend/pretrain_llama2_7b_fp16.yaml"
CLUSTER = "ascend/cluster_llama2_7b_fp16.yaml"
# For YAML files under configs/: the initial loss scale, the window ladder and the hysteresis of the update cell.
PROMISED = {
    "tiny_llama_cpu_fp16.yaml": (2.0**32, DEFAULT_LADDER, 1),
    "tiny_llama_cpu_fp16_parallel.yaml": (2.0**32, DEFAULT_LADDER, 1),
    PRETRAIN: (2.0**32, DEFAULT_LADDER, 1),
    CLUSTER: (2.0**32, DEFAULT_LADDER, 1),
    "ascend/finetune_llama2_7b_fp16.yaml": (2.0**16, DEFAULT_LADDER, 1),
    "ascend/resume_llama2_7b_fp16.yaml": (2.0**32, DEFAULT_LADDER, 1),
    "ascend/megatron_like_llama2_7b_fp16.yaml": (2.0**32, (1000,), 2),
}


def load(file):
    return load_config(FOLDER / file)


def test_all_promised_files_are_there():
    assert set(PROMISED) <= set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_mindformers_knows_every_key_and_every_class(file, mindformers_log):
    # MindFormers raises a KeyError if a section of the YAML file has an unknown key.
    config = load(file)
    assert "useless" not in mindformers_log.text
    # LlamaConfig silently accepts keys that it does not know. So compare the keys of the file with the parameters of
    # LlamaConfig.
    keys = set(config.model.model_config) - {"type"}
    assert keys <= set(inspect.signature(LlamaConfig).parameters) - {"kwargs"}
    named = [
        (MindFormerModuleType.TRAINER, config.trainer),
        (MindFormerModuleType.OPTIMIZER, config.optimizer),
        (MindFormerModuleType.LR, config.lr_schedule),
        (MindFormerModuleType.DATASET, config.train_dataset_task),
        (MindFormerModuleType.CONFIG, config.model.model_config),
        (MindFormerModuleType.MODELS, config.model.arch),
        *((MindFormerModuleType.CALLBACK, callback) for callback in config.callbacks),
    ]
    for module_type, section in named:
        assert MindFormerRegister.is_exist(module_type, section["type"]), section["type"]


@pytest.mark.parametrize("file", sorted(name for name in FILES if name.startswith("ascend/")))
def test_ascend_file_has_graph_mode_fp16_and_flash_attention(file):
    config = load(file)
    assert (config.context.device_target, config.context.mode) == ("Ascend", 0)
    assert (config.model.model_config.compute_dtype, config.model.model_config.use_flash_attention) == ("float16", True)
    assert (config.runner_config.sink_mode, config.runner_config.sink_size) == (True, 2)
    split = config.parallel_config
    assert split.data_parallel * split.model_parallel * split.pipeline_stage == (16 if file == CLUSTER else 8)


@pytest.mark.parametrize("devices", [16, 12])
def test_mindformers_checks_of_the_parallel_sizes_of_a_cluster(devices, monkeypatch):
    monkeypatch.setenv("RANK_SIZE", str(devices))
    config = load(CLUSTER)
    ParallelOperator(config)
    assert config.parallel.pipeline_stages == 2
    build_parallel_config(config)
    # MindFormers' Trainer turns the metric into a list before it calls check_rules().
    config.metric = [config.metric]
    mindspore.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    try:
        if devices == 16:
            check_rules(config, "train")
        else:
            with pytest.raises(ValueError, match="4\\*2\\*1\\*2 = 16 != device_num\\(12\\)"):
                check_rules(config, "train")
    finally:
        mindspore.reset_auto_parallel_context()


@pytest.mark.parametrize("file", FILES)
def test_cells_are_this_packages_with_the_values_of_the_file(file):
    config = load(file)
    section = config.runner_wrapper.scale_sense
    train_step = build_train_step(config)
    assert type(train_step) is getattr(wrapper, config.runner_wrapper.type)
    assert train_step.use_clip_grad is config.runner_wrapper.use_clip_grad

    cell = train_step.loss_scaling_manager
    assert type(cell) is wrapper.AdaptiveLossScaleUpdateCell
    assert train_step.scale_sense.asnumpy() == cell.get_loss_scale() == section.loss_scale_value
    assert (cell.rule.ladder[0], cell.rule.ladder[-1]) == (section.min_scale_window, section.max_scale_window)
    assert cell.rule.scale_factor == section.scale_factor
    assert cell.rule.hysteresis == section.get("hysteresis", 1)
    assert cell.rule.min_loss_scale == section.get("min_loss_scale", 1.0)
    # The cell uses the scale window of the YAML file. It does not warn and fall back to its smallest window.
    assert cell.state()["scale_window"] == section.scale_window
    if file in PROMISED:
        assert (cell.get_loss_scale(), cell.rule.ladder, cell.rule.hysteresis) == PROMISED[file]


def test_fine_tuning_and_resuming_load_a_checkpoint():
    finetune = load("ascend/finetune_llama2_7b_fp16.yaml")
    assert (finetune.run_mode, finetune.resume_training, finetune.auto_trans_ckpt) == ("finetune", False, True)
    assert finetune.train_dataset.input_columns == ["input_ids", "labels"]
    resume = load("ascend/resume_llama2_7b_fp16.yaml")
    assert (resume.run_mode, resume.resume_training) == ("train", True)
    written = next(callback for callback in resume.callbacks if callback["type"] == "CheckpointMonitor")
    assert resume.load_ckpt_format == written["checkpoint_format"] == "safetensors"

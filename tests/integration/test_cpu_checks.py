"""What cannot run on a CPU is refused before anything is built, with its key and what to set instead."""

import warnings

import pytest
from conftest import ROOT
from examples.tiny_llama import build_dataset, build_model
from mindformers import TrainingArguments

from mindformers_adaptive.integration.launcher import load_config
from mindformers_adaptive.integration.trainer import Trainer

CONFIG = ROOT / "configs" / "tiny_llama_cpu_fp16.yaml"
MODEL = "model.model_config"
PARALLEL = {"use_parallel": True}
# changes of the YAML file, and what the message says of them
REFUSED = [
    ({f"{MODEL}.use_flash_attention": True}, "use_flash_attention' must be False, but is True: .*FlashAttentionScore"),
    ({f"{MODEL}.fused_rms_norm": True}, "fused_rms_norm' must be False, but is True: .*RmsNorm"),
    ({f"{MODEL}.use_rope_slice": False}, "use_rope_slice' must be True, but is False"),
    ({f"{MODEL}.compute_dtype": "bfloat16"}, "compute_dtype' must be another type, but is bfloat16. Set it to float16"),
    ({f"{MODEL}.param_init_type": "bfloat16"}, "param_init_type' must be another type, but is bfloat16"),
    ({f"{MODEL}.layernorm_compute_type": "bfloat16"}, "layernorm_compute_type' must be another type"),
    ({"moe_config": {"expert_num": 4}}, "'moe_config.expert_num' must be 1, but is 4"),
    ({"use_legacy": False}, "'use_legacy' must be True, but is False: the mcore models need"),
    ({**PARALLEL, "parallel.parallel_mode": 1}, r"'parallel.parallel_mode' must be 0 \(data parallel\), but is 1"),
    ({**PARALLEL, "parallel.parallel_mode": "auto_parallel"}, "parallel_mode' must be 0 .*, but is auto_parallel"),
    ({**PARALLEL, "parallel_config.pipeline_stage": 2}, "'parallel_config.pipeline_stage' must be 1, but is 2"),
    ({**PARALLEL, "parallel_config.model_parallel": 4}, "'parallel_config.model_parallel' must be 1, but is 4"),
    ({"monitor_config": {"monitor_on": True, "dump_path": "./dump"}}, "dump_path' must be '', but is './dump'"),
    ({"optimizer.type": "Lamb"}, "'optimizer.type' must be another optimizer, but is Lamb. Set it to AdamW"),
]

pytestmark = pytest.mark.usefixtures("registry_put_back")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(changes):
    """Load the YAML file of the demo with other values."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(it is added|needs no loss scaling)")
        return load_config(CONFIG, changes)


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[[*row[0]][-1] for row in REFUSED])
def test_the_launcher_names_the_key_and_what_to_set(changes, message):
    with pytest.raises(ValueError, match=rf"^This cannot be trained on a CPU:\n- '.*{message.lstrip(chr(39))}"):
        load(changes)


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[[*row[0]][-1] for row in REFUSED])
def test_the_same_is_left_to_mindformers_on_an_ascend(changes, message):
    load({"context.device_target": "Ascend", **changes})


def test_all_that_is_wrong_is_named_at_once():
    with pytest.raises(ValueError, match=r"use_flash_attention(.|\n)*compute_dtype(.|\n)*monitor_config.dump_path"):
        load({f"{MODEL}.use_flash_attention": True, f"{MODEL}.compute_dtype": "bfloat16", **REFUSED[-2][0]})


@pytest.mark.parametrize(
    "changes",
    [
        {"monitor_config": {"monitor_on": True, "dump_path": "", "local_norm_format": ["log"]}},
        {"monitor_config": {"monitor_on": False, "dump_path": "./dump"}},
        # MindFormers reads these in a parallel run only.
        {"parallel.parallel_mode": 1, "parallel_config.pipeline_stage": 2},
        {**PARALLEL, "parallel_config.data_parallel": 2},
    ],
    ids=str,
)
def test_what_runs_on_a_cpu_is_accepted(changes):
    load(changes)


def test_a_key_that_is_not_in_the_file_has_the_default_of_the_model(tmp_path):
    text = CONFIG.read_text(encoding="utf-8").replace("    fused_rms_norm: False\n", "")
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="fused_rms_norm' must be False, but is True"):
        load_config(tmp_path / "my.yaml")


def test_trainer_looks_at_the_model_that_it_is_given():
    model = build_model()
    model.config.use_flash_attention = True
    arguments = TrainingArguments(output_dir="output", num_train_epochs=1, batch_size=4, sink_mode=False)
    trainer = Trainer(arguments, model=model, train_dataset=build_dataset().take(1))
    with pytest.raises(ValueError, match="use_flash_attention' must be False, but is True"):
        trainer.train()

"""The cases to compile for an Ascend: update cells, train steps and models.

A case names a function of steps.py, so this module needs no MindSpore.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class World:
    """The processes of the simulated training for which a case is compiled, and how they share the work.

    Attributes:
        ranks (int): the number of processes. Default: 1.
        rank (int): the rank of the process that compiles. Default: 0.
        mode (str): MindSpore's parallel mode. Default: "stand_alone".
        stages (int): pipeline stages. Default: 1.
        shards_optimizer (bool): whether the optimizer's state is divided among data-parallel processes. Default: False.
    """

    ranks: int = 1
    rank: int = 0
    mode: str = "stand_alone"
    stages: int = 1
    shards_optimizer: bool = False


ALONE = World()
# MindSpore's names for the two kinds of Ascend chips.
CHIPS = {"910A": "ascend910", "910B": "ascend910b"}


@dataclass(frozen=True)
class Case:
    """A cell, train step or model to compile for an Ascend.

    Attributes:
        name (str): ``setting/way`` for a train step that is compiled with several ways of scaling the loss.
        function (str): the name of the function in steps.py that compiles the case.
        arguments (Mapping): the arguments of the function.
        chip (str): a key of ``CHIPS``. Default: "910B".
        world (World): the processes of the training. Default: ``ALONE``.
        is_large (bool): whether the case is compiled only with ``--all`` or by name. Default: False.
        needs_process (bool): whether the case needs a process of its own. Default: False.
    """

    name: str
    function: str
    arguments: Mapping = field(default_factory=dict)
    chip: str = "910B"
    world: World = ALONE
    is_large: bool = False
    needs_process: bool = False


STOCK, ADAPTIVE, GUIDED = "stock", "adaptive", "guided"
# The ways of scaling and their display names. "stock" is MindSpore's dynamic update cell in a train-step cell of
# MindSpore or MindFormers; the other ways are cells of this package.
WAYS = {STOCK: "stock", ADAPTIVE: "adaptive", GUIDED: "guided"}

# The control cases, which check the dry run itself. Each case compiles one operator. None means that the operator must
# compile for the Ascend. Otherwise, the value is the operator that must move to the CPU because an Ascend has no kernel
# for it, or a part of the error that the dry run must raise.
CONTROLS = {
    "control/Add": None,
    "control/FloatStatus": "FloatStatus",
    "control/AvgPool_int32": "AvgPool",
    "control/Fmax": "Fmax",
}

_CELLS = {
    "dynamic": {"way": "dynamic"},
    "mindformers": {"way": "mindformers"},
    "adaptive": {"way": ADAPTIVE},
    "adaptive_hysteresis": {"way": ADAPTIVE, "hysteresis": 2},
    "adaptive_history": {"way": ADAPTIVE, "history_size": 8},
    "adaptive_bounds": {
        "way": ADAPTIVE,
        "min_loss_scale": 2.0**-4,
        "max_loss_scale": 2.0**24,
        "shrink_from_min_window": True,
    },
    "guided": {"way": GUIDED},
    "guided_history": {"way": GUIDED, "history_size": 8},
    "guided_bounds": {"way": GUIDED, "margin": 4, "min_loss_scale": 2.0**-4, "max_loss_scale": 2.0**24},
    "log_max": {"way": "log_max"},
}


def _in_each_way(setting, function, ways=WAYS, **options):
    arguments = options.pop("arguments", {})
    return [Case(f"{setting}/{way}", function, {"way": way, **arguments}, **options) for way in ways]


# The train-step cases that are compiled by default. The other train steps are compiled only with --all or by name.
_QUICK = (
    "step/910A/guided",
    "step/910B/adaptive",
    "step/910B/guided",
    "mf_step/guided",
    "per_token/guided",
    "fixed_scale/adaptive",
    "scaler/guided",
    "watched/stock",
    "semi_auto_2/guided",
    "pipeline_2/rank_1/guided",
)

_DATA, _SEMI_AUTO = "data_parallel", "semi_auto_parallel"
_OURS = (ADAPTIVE, GUIDED)


def _steps():
    """Yield the cases that compile a train step of a tiny network, not of a whole model."""
    for chip in CHIPS:
        yield from _in_each_way(f"step/{chip}", "plain_step", chip=chip)
    yield from _in_each_way("step_fp16_weights", "plain_step", arguments={"network": "in FP16"})
    yield from _in_each_way("mf_step", "mf_step")
    per_token = {"network": "SumAndNumber", "calculate_per_token_loss": True}
    for setting, arguments in {
        "per_token": per_token,
        "accumulation": {"network": "accumulating"},
        "local_norm": {"local_norm": True},
        "skip_by_norm": {"use_skip_data_by_global_norm": True},
        "recompute": {"network": "recomputed"},
        "lazy_inline": {"network": "InlinedLate"},
        "low_rank": {"network": "LowRank"},
        "grouped_rates": {"optimizer": "grouped"},
        "averaging": {"optimizer": "averaging"},
    }.items():
        yield from _in_each_way(setting, "mf_step", arguments=arguments)
    yield from _in_each_way("fixed_scale", "fixed_scale_step", (STOCK, ADAPTIVE))
    for setting in ("built", "model", "scaler"):
        yield from _in_each_way(setting, f"{setting}_step")
    yield from _in_each_way("watched", "watched_step", (STOCK,))
    for ranks in (2, 8):
        yield from _in_each_way(f"data_parallel_{ranks}", "plain_step", world=World(ranks, mode=_DATA))
    split = World(2, 1, _SEMI_AUTO)
    yield from _in_each_way("semi_auto_2", "plain_step", world=split, arguments={"network": "split"})
    per_token = {**per_token, "network": "split, SumAndNumber"}
    yield from _in_each_way("per_token_semi_auto_2", "mf_step", (STOCK, GUIDED), world=split, arguments=per_token)
    for stages in (2, 4):
        for rank in range(stages):
            world = World(stages, rank, _SEMI_AUTO, stages)
            ways = WAYS if stages == 2 else (GUIDED,)
            yield from _in_each_way(f"pipeline_{stages}/rank_{rank}", "pipeline_step", ways, world=world)


_SMALL = {"seq_length": 32, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 256, "multiple_of": 64}
_SMALL = {f"model.model_config.{name}": value for name, value in _SMALL.items()}
_FUSED = {"use_flash_attention": True, "fused_rms_norm": True, "use_rope_slice": False}
_FUSED = {f"model.model_config.{name}": value for name, value in _FUSED.items()}
_LORA = {"pet_type": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ".*wq|.*wv"}
# The YAML files for an Ascend, each with its number of processes and its number of pipeline stages.
_FILES = {"pretrain": (8, 1), "finetune": (8, 1), "resume": (8, 1), "megatron_like": (8, 1), "cluster": (16, 2)}


def _launched(setting, config="tiny_llama_cpu_fp16.yaml", ranks=1, rank=0, ways=WAYS, **options):
    world, arguments = World(ranks, rank), {"config": config, **_SMALL, **options}
    options = {"world": world, "needs_process": True, "is_large": True, "arguments": arguments}
    return _in_each_way(setting, "launched", ways, **options)


def _split(data=1, model=1, stages=1, **parallel):
    """Return the keys of a MindFormers YAML file that set semi-automatic parallelism."""
    sizes = {"data_parallel": data, "model_parallel": model, "pipeline_stage": stages, "micro_batch_num": stages}
    parallel = {"parallel_mode": 1, "full_batch": True, "gradients_mean": False, **parallel}
    keys = {"parallel_config": sizes, "parallel": parallel}
    return {"use_parallel": True} | {f"{key}.{name}": value for key, of in keys.items() for name, value in of.items()}


def _models():
    """Yield the cases that compile a train step of a whole model, or of a YAML file of this project for an Ascend."""
    guided = (GUIDED,)
    yield from _launched("llama")
    yield from _launched("llama_fused", ways=_OURS, **_FUSED)
    yield from _launched("llama_watched", ways=(STOCK,), watched=True)
    yield from _launched("llama_lora", ways=guided, **{"model.model_config.pet_config": _LORA})
    yield from _launched("llama_recompute", ways=guided, **{"recompute_config.recompute": True})
    for model in ("qwen3", "deepseek_v3"):
        options = {"needs_process": True, "is_large": True, "arguments": {"model": model}}
        yield from _in_each_way(model, "mcore_step", _OURS, **options)
    watched = {"needs_process": True, "is_large": True, "arguments": {"model": "qwen3", "watched": True}}
    yield from _in_each_way("qwen3_watched", "mcore_step", (ADAPTIVE,), **watched)
    yield from _launched("llama_data_parallel_2", "tiny_llama_cpu_fp16_parallel.yaml", 2, ways=_OURS)
    yield from _launched("llama_model_parallel_2", ranks=2, ways=_OURS, **_FUSED, **_split(model=2))
    sharding = _split(data=2, enable_parallel_optimizer=True)
    yield from _launched("llama_optimizer_sharding_2", ranks=2, ways=guided, **_FUSED, **sharding)
    accumulation = {"runner_config.gradient_accumulation_steps": 2}
    yield from _launched("llama_accumulation_2", ranks=2, ways=_OURS, **_FUSED, **_split(data=2), **accumulation)
    for rank in range(2):
        stages = {"ranks": 2, "rank": rank, **_FUSED, **_split(stages=2)}
        yield from _launched(f"llama_pipeline_2/rank_{rank}", ways=_OURS, **stages)
    for name, (ranks, stages) in _FILES.items():
        # The dry run compiles a small model in place of the YAML file's model, so it cannot load the file's checkpoint.
        options = {"load_checkpoint": "", "auto_trans_ckpt": False, "resume_training": False}
        ways = _OURS if stages > 1 else (ADAPTIVE,)
        for rank in range(0, ranks, ranks // stages):
            file = f"ascend/{name}_llama2_7b_fp16.yaml"
            yield from _launched(f"yaml_{name}/rank_{rank}", file, ranks, rank, ways, as_it_is=True, **options)


def _cases():
    yield from (Case(name, "control", {"operator": name.rpartition("/")[2]}) for name in CONTROLS)
    yield from (Case(f"cell/{name}", "update_cell_alone", arguments) for name, arguments in _CELLS.items())
    yield from (case if case.name in _QUICK else replace(case, is_large=True) for case in _steps())
    yield from _models()


CASES = {case.name: case for case in _cases()}

"""Training runs of the launcher: start, kill and resume them, and read what they printed and saved."""

import copy
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mindspore
import numpy as np
import yaml
from mindformers import TrainingArguments
from mindformers.wrapper import build_wrapper

from mindformers_adaptive.mindformers.checkpoint_formats import read_sidecar
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.saved_state import all_fields, own_keys
from mindformers_adaptive.rules.state_dict import RUN
from tests.conftest import CONFIG, ROOT
from tests.shared.every_rule import RULES
from tests.shared.launched import ForkedCluster, ForkedRun, StartedRun, free_port, with_this_python
from tests.shared.networks import Dense
from tests.shared.versions import BEFORE_1_7

SMALL_MODEL = {
    "model.model_config.seq_length": 32,
    "model.model_config.hidden_size": 32,
    "model.model_config.num_layers": 1,
}
# These scale windows are so small that the window, its index and every counter change within 40 steps. The initial loss
# scale is so large that FP16 gradients really overflow.
_SCALE_SENSE = {"loss_scale_value": 2**20, "scale_window": 1, "min_scale_window": 1, "max_scale_window": 4}
_BATCH_SIZE = 8


def as_options(values):
    """Return command-line arguments that set keys of the YAML file."""
    return ["--options", *(f"{key}={value}" for key, value in values.items())]


def training_arguments(**changes):
    """Return MindFormers' arguments for a short training of the examples' Llama."""
    arguments = {"output_dir": "output", "num_train_epochs": 1, "batch_size": 4, "sink_mode": False}
    return TrainingArguments(**{**arguments, **changes})


class Step(NamedTuple):
    """The values in MindFormers' log line of a step. The line already has the loss scale of the next step."""

    loss: str
    overflow: bool
    loss_scale: float
    global_norm: str


@dataclass(frozen=True)
class LegacyFormat:
    """MindFormers' legacy checkpoint format: one file for each step; ``meta.json`` names the last complete file."""

    extension: str
    async_save: bool = False
    optimizer_state = True

    def save_options(self, output, every, keep):
        return {
            "callbacks.1.checkpoint_format": self.extension,
            "callbacks.1.async_save": self.async_save,
            "callbacks.1.save_checkpoint_steps": every,
            "callbacks.1.keep_checkpoint_max": keep,
        }

    def resume_options(self, output, resume_training=True):
        return {
            "load_checkpoint": output / "checkpoint",
            "resume_training": resume_training,
            "load_ckpt_format": self.extension,
        }

    def note(self, output, rank=0):
        """Return the file that names the last complete checkpoint."""
        return output / "checkpoint" / f"rank_{rank}" / "meta.json"

    def names(self, output):
        """Return the file names in the folder of checkpoints; each save adds a name when it begins."""
        return set(os.listdir(output / "checkpoint" / "rank_0"))

    def newest_complete(self, output, rank=0):
        """Return the step of the checkpoint that ``meta.json`` names, or None."""
        note = self.note(output, rank)
        if not note.exists():
            return None
        # Do not read the step number from the file name: in a resumed run, the numbers in file names restart at 1.
        return int(_load(note.parent / json.loads(note.read_text())["last_ckpt_file"])["step_num"])

    def last_saved(self, output, rank=0):
        """Return all Parameters of the last checkpoint of a finished run."""
        files = (output / "checkpoint" / f"rank_{rank}").glob(f"*.{self.extension}")
        return _load(max(files, key=lambda file: file.stat().st_mtime_ns))


@dataclass(frozen=True)
class CheckpointSection:
    """MindFormers' ``checkpoint:`` format: a folder per step; ``latest_checkpointed_iteration.txt`` names the last."""

    async_save: bool = False
    optimizer_state: bool = True

    def save_options(self, output, every, keep):
        options = {
            "checkpoint.save_path": output / "saved",
            "checkpoint.save_interleaved_steps": every,
            "checkpoint.save_max": keep,
            "checkpoint.async_save": self.async_save,
            "checkpoint.no_save_optim": not self.optimizer_state,
            "checkpoint.no_load_optim": False,
            "load_ckpt_format": "safetensors",
        }
        if not self.optimizer_state:
            options["optimizer"] = "{type: SGD, momentum: 0.0}"
        return options

    def resume_options(self, output):
        return {"checkpoint.load_path": output / "saved"}

    def note(self, output, rank=0):
        """Return the file that has the step of the last complete checkpoint."""
        return output / "saved" / "latest_checkpointed_iteration.txt"

    def names(self, output):
        """Return the folder names in the folder of checkpoints; each save adds a name when it begins."""
        return set(os.listdir(output / "saved"))

    def newest_complete(self, output, rank=0):
        """Return the step in ``latest_checkpointed_iteration.txt``, or None."""
        note = self.note(output)
        text = note.read_text() if note.exists() else ""
        return int(text) if text else None

    def last_saved(self, output, rank=0):
        """Return all Parameters of the last checkpoint of a finished run, with the values of ``loss_scale.json``."""
        folder = output / "saved" / f"iteration_{self.newest_complete(output):08d}"
        saved = {}
        for file in folder.glob("*.safetensors"):
            saved |= _load(file)
        loss_scale, state = read_sidecar(folder)
        sidecar = as_parameters({"loss_scale": loss_scale, **state})
        for name in saved.keys() & sidecar.keys():
            assert saved[name] == sidecar[name], name
        assert json.loads((folder / "common.json").read_text())["loss_scale"] == loss_scale
        return saved | sidecar


def _written_at(note):
    """Return when ``note``, a file that names a checkpoint, was last written (in ns); None if missing or empty."""
    status = note.stat() if note.exists() else None
    return status.st_mtime_ns if status and status.st_size > 0 else None


def _load(file):
    """Return the Parameters of a checkpoint file, each as a number or as the bytes of an array."""
    loaded = mindspore.load_checkpoint(str(file), format=file.suffix[1:])
    arrays = {name: value.asnumpy() if hasattr(value, "asnumpy") else value for name, value in loaded.items()}
    return {name: array.item() if getattr(array, "size", 0) == 1 else array.tobytes() for name, array in arrays.items()}


def as_parameters(state):
    """Return a loss scale and the state of a rule in the form of the Parameters that :func:`_load` returns."""
    rule = max(RULES, key=lambda rule: len(state.keys() & set(own_keys(rule))))
    parameters = {"scale_sense": state["loss_scale"]}
    for field in all_fields(rule):
        if field.keys[0] in state:
            value = [state[part] for part in field.parts] if field.parts else state[field.name]
            parameters[field.parameter] = np.array(value, field.dtype).tobytes() if field.shape else value
    return parameters


def assert_ends_with_the_parameters_of(saved, reference):
    """Assert that ``saved`` and ``reference`` have equal values of the Parameters that both have."""
    both = saved.keys() & reference.keys() - {"global_batch_size", RUN}
    assert len(both) > 15
    assert {name for name in both if saved[name] != reference[name]} == set()


def assert_one_record_has_every_step_once(output, expected):
    # All runs share one record, and only the first of several processes writes it.
    record = read_record(output / "loss_scale_record.jsonl")
    assert [entry["step"] for entry in record] == list(expected)
    for entry, step in zip(record, expected.values(), strict=True):
        assert (entry["overflow"], entry["next_loss_scale"]) == (step.overflow, step.loss_scale)
    assert len(list(output.rglob("*.jsonl*"))) == 1


class Machine(NamedTuple):
    """One of several machines that network namespaces simulate.

    Attributes:
        namespace (str): the name of the namespace.
        number (int): the number of the machine, from 0.
        first_address (str): the address of machine 0.
    """

    namespace: str
    number: int
    first_address: str


class TrainingRun:
    """A run of the launcher, in one process or in several, that has been started.

    Args:
        output (Path): the output folder, which is created if it does not exist; the logs are beside it.
        corpus (Path): the folder of the training data.
        options (dict): keys of the YAML file and their values.
        steps (int): the number of steps of the training.
        processes (int): the number of data-parallel processes.
        by_msrun (bool): whether scripts/launch/launch_many.sh starts the processes; otherwise they are forked.
        machine (Machine, optional): the machine on which that script starts its one process.
        arguments (Sequence[str]): further options of the launcher.
        environment (dict, optional): further environment variables.
        hold_after (int, optional): the number of steps after which the last callback holds the run, until the run is
            killed or :meth:`go_on` is called.
        compiled (Path, optional): the folder in which MindSpore caches the compiled graph; only runs with equal graphs
            may share it.
    """

    _started = 0

    def __init__(
        self,
        output,
        corpus,
        options,
        steps=40,
        processes=1,
        *,
        by_msrun=False,
        machine=None,
        arguments=(),
        environment=None,
        hold_after=None,
        compiled=None,
    ):
        TrainingRun._started += 1
        logs = output.with_name(f"{output.name}.{TrainingRun._started}.logs")
        logs.mkdir(parents=True)
        self._console = logs / "console.log"
        self.logs = [self._console] if processes == 1 else [logs / f"worker_{rank}.log" for rank in range(processes)]
        # MindFormers before 1.7 divides ``num_samples`` by the number of processes, so multiply it by this number.
        sharing = processes if BEFORE_1_7 else 1
        options = {
            **SMALL_MODEL,
            "output_dir": output,
            "train_dataset.data_loader.dataset_dir": corpus,
            "train_dataset.data_loader.num_samples": steps * _BATCH_SIZE * sharing,
            "lr_schedule.total_steps": steps,
            **{f"runner_wrapper.scale_sense.{key}": value for key, value in _SCALE_SENSE.items()},
            **options,
        }
        command = [ROOT / "scripts" / "launch" / "run_mindformer.py"]
        environment = {**with_this_python(), "PYTHONPATH": str(ROOT), **(environment or {})}
        config = CONFIG
        if compiled is not None:
            environment |= {"MS_COMPILER_CACHE_ENABLE": "1", "MS_COMPILER_CACHE_PATH": str(compiled)}
        if by_msrun:
            command = ["bash", ROOT / "scripts" / "launch" / "launch_many.sh", processes]
            environment |= {"MASTER_PORT": str(free_port()), "LOG_DIR": str(logs)}
        if machine is not None:
            command = ["ip", "netns", "exec", machine.namespace, *command[:-1], "1"]
            environment |= {"MACHINES": str(processes), "MACHINE": str(machine.number), "MASTER_PORT": "8118"}
            environment |= {"MASTER_ADDRESS": machine.first_address}
        if processes > 1:
            # The base_config of tiny_llama_cpu_fp16_parallel.yaml is the demo's YAML file.
            config = CONFIG.with_name("tiny_llama_cpu_fp16_parallel.yaml")
            options["parallel_config.data_parallel"] = processes
        if hold_after is not None:
            config = _with_hold(config, hold_after, logs)
            arguments = [*arguments, "--register-path", Path(__file__).parent]
        command = list(map(str, [*command, "--config", config, *arguments, *as_options(options)]))
        if by_msrun:
            self.process = StartedRun(command, logs, environment, self._console)
        elif processes > 1:
            self.process = ForkedCluster(processes, command, logs, environment, self.logs)
        else:
            self.process = ForkedRun(command, logs, environment, self._console)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def wait(self, timeout=900):
        """Wait for the end of the run; return the run."""
        try:
            exit_code = self.process.wait(timeout)
        finally:
            self.kill()
        ends = [f"{log.name} ends:\n{log.read_text()[-3000:]}" for log in {*self.logs, self._console} if log.exists()]
        codes = getattr(self.process, "exit_codes", [exit_code])
        assert exit_code == 0, "\n".join([f"exit codes of the processes: {codes}", *sorted(ends)])
        return self

    def wait_until(self, happened, timeout=900):
        """Call ``happened()`` repeatedly until it is true. The calls use at most a fifth of a processor core."""
        start = looked_at = time.monotonic()
        while not happened():
            assert self.process.poll() is None, "the run ended too early; its log ends:\n" + self.text()[-5000:]
            assert looked_at < start + timeout, f"timed out after {timeout} s; the log ends:\n" + self.text()[-5000:]
            time.sleep(max(0.0005, 4 * (time.monotonic() - looked_at)))
            looked_at = time.monotonic()

    def wait_until_saved(self, form, output):
        """Wait until the first checkpoint since the start of the run is complete."""
        # Do not load checkpoints to see whether they are complete: that takes as long as several steps, or longer.
        # Watch the file that names the last complete checkpoint instead.
        note = form.note(output)
        before = _written_at(note)
        self.wait_until(lambda: _written_at(note) not in (None, before))
        if form.async_save:
            self.wait_until(lambda: form.newest_complete(output) is not None)

    def go_on(self):
        """Let all processes of a run that is held go on."""
        (self._console.parent / "go_on").touch()

    def kill(self):
        """Kill all processes of the run with SIGKILL, so that they cannot clean up."""
        self.process.kill_all()

    def text(self, rank=0):
        """Return what a process has printed so far."""
        return self.logs[rank].read_text() if self.logs[rank].exists() else ""

    def steps(self, rank=0):
        """Return, by step number, the values of each step in the log lines that a process has printed."""
        pattern = (
            r"step:\[ *(\d+)/ *\d+\], loss:\[([^/]+)/.* overflow cond: (True|False), loss_scale: (\S+), "
            r"global_norm: (\S+?),?\s"
        )
        return {
            int(step): Step(loss, overflow == "True", float(scale), norm)
            for step, loss, overflow, scale, norm in re.findall(pattern, self.text(rank))
        }

    def restored_state(self, rank=0):
        """Return the numbers in the run's log line that says from which state loss scaling continues."""
        [listed] = re.findall("Loss scaling goes on from: (.*)", self.text(rank))
        pairs = dict(item.split() for item in listed.split(", "))
        fields = [field for rule in RULES for field in all_fields(rule)]
        floats = {"loss_scale", *(key for field in fields if field.dtype == "float32" for key in field.keys)}
        return {name: float(value) if name in floats else int(value) for name, value in pairs.items()}


def _with_hold(config, steps, folder):
    """Write a YAML file that adds a ``HoldAfter`` callback to the file ``config``; return the written file."""
    callbacks = yaml.safe_load(CONFIG.read_text())["callbacks"]
    # MindFormers finds the class HoldAfter in its register_path, the folder of this module.
    hold = {"type": "HoldAfter", "auto_register": "run_callbacks.HoldAfter", "steps": steps}
    written = folder / config.name
    written.write_text(yaml.safe_dump({"base_config": str(config), "callbacks": [*callbacks, hold]}))
    return written


def build_train_step(config):
    """Return a train-step cell for a dense layer, as MindFormers builds it from a configuration."""
    dense = Dense()
    # The arguments that MindFormers' trainer passes to build_wrapper(). For cells that MindFormers does not define,
    # build_wrapper() removes `parallel_config`, because such cells do not accept it.
    default_args = {
        "network": dense.network,
        "optimizer": dense.optimizer(),
        "parallel_config": config.parallel_config,
        "calculate_per_token_loss": False,
        "global_norm_spike_threshold": 1.0,
        "print_separate_loss": True,
        "use_skip_data_by_global_norm": False,
        "lr_scheduler": None,
        "grouped_lr_scheduler": None,
    }
    # Pass a copy of the section `runner_wrapper`: MindFormers replaces its `scale_sense` by the update cell it builds.
    return build_wrapper(copy.deepcopy(config.runner_wrapper), default_args=default_args).set_train()

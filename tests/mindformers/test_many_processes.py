"""In data-parallel trainings on a CPU, an overflow in one process makes all processes skip the step."""

import json
import os
import shutil
import subprocess

import pytest
import yaml

from mindformers_adaptive.record.step import FIELDS
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.state_dict import RUN
from tests.conftest import ROOT
from tests.mindformers.training_runs import LegacyFormat, TrainingRun
from tests.shared.records import assert_follows

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("several processes")]

PLANTED_FOLDER = ROOT / "tests" / "mindformers"
STEPS, PLANTED, SAVED_EVERY = 32, {12, 13, 20, 21, 22, 28}, 16
FORM = LegacyFormat("ckpt")


@pytest.fixture(scope="module")
def four_processes(long_corpus, tmp_path_factory):
    """Return the output folder of a run of four processes; the last process overflowed on purpose in steps PLANTED."""
    output = tmp_path_factory.mktemp("four") / "output"
    callbacks = [
        *callbacks_that_save(every=SAVED_EVERY),
        {"type": "LossScaleMonitor", "all_ranks": True},
        {"type": "PlantedOverflow", "auto_register": "run_callbacks.PlantedOverflow", "rank": 3},
    ]
    callbacks[3] |= {"steps": sorted(PLANTED)}
    arguments = ["--register-path", str(PLANTED_FOLDER)]
    TrainingRun(output, long_corpus, {"callbacks": as_option(callbacks)}, STEPS, 4, arguments=arguments).wait()
    return output


def callbacks_that_save(every):
    saving = {"type": "CheckpointMonitor", "prefix": "tiny_llama", "save_checkpoint_steps": every}
    saving |= {"keep_checkpoint_max": 5, "integrated_save": False, "checkpoint_format": "ckpt"}
    return [{"type": "MFLossMonitor", "per_print_times": 1}, saving]


def as_option(value):
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()


def records(output, processes):
    return [read_record(output / f"loss_scale_record_rank_{rank}.jsonl") for rank in range(processes)]


def without_loss(record):
    return [{field: line.get(field) for field in FIELDS if field != "loss"} for line in record]


def test_an_overflow_of_one_of_four_is_skipped_by_all(four_processes):
    first, *more = records(four_processes, 4)
    assert [line["step"] for line in first] == list(range(1, STEPS + 1))
    assert {line["step"] for line in first if line["overflow"]} > PLANTED
    rule = AdaptiveRule(max_scale_window=4, min_scale_window=1)
    assert_follows(rule, rule.start(2.0**20), first)
    for record in more:
        assert without_loss(record) == without_loss(first)
        # The losses differ, because each process has its own data.
        assert [line["loss"] for line in record] != [line["loss"] for line in first]


def test_four_processes_hold_the_same_weights_and_state(four_processes):
    first, *more = (FORM.last_saved(four_processes, rank) for rank in range(4))
    assert first["step_num"] == STEPS
    assert len(first) > 40
    for saved in (first, *more):
        # Each process writes its own record, so each has a different run number. Leave it out of the comparison.
        assert saved.pop(RUN) > 0
    assert more == [first] * 3


@pytest.fixture(scope="module")
def two_processes(four_processes, long_corpus, tmp_path_factory):
    """Return a run and its output folder: two processes resume from a checkpoint of four, and train for 4 steps."""
    output = shutil.copytree(four_processes, tmp_path_factory.mktemp("two") / "output")
    ranges = {"type": "GradientRangeMonitor", "every_n_steps": 2, "all_ranks": True}
    options = {"callbacks": as_option([*callbacks_that_save(every=2 * STEPS), ranges])}
    options |= FORM.resume_options(output, resume_training=f"tiny_llama_rank_0-1_{SAVED_EVERY}.ckpt")
    # A step of two processes has half as many samples as a step of four processes, so MindFormers counts twice as many
    # steps before the resume.
    return TrainingRun(output, long_corpus, options, 2 * SAVED_EVERY + 4, processes=2).wait(), output


def test_two_processes_go_on_from_a_checkpoint_of_four(four_processes, two_processes):
    resumed, _ = two_processes
    [saved] = (line for line in records(four_processes, 1)[0] if line["step"] == SAVED_EVERY)
    for rank in range(2):
        restored = resumed.restored_state(rank)
        assert restored["loss_scale"] == saved["next_loss_scale"]
        assert {name: restored[name] for name in FIELDS[5:10]} == {name: saved[name] for name in FIELDS[5:10]}
        assert list(resumed.steps(rank)) == [2 * SAVED_EVERY + number for number in (1, 2, 3, 4)]
    assert [step.loss_scale for step in resumed.steps(0).values()] == [
        step.loss_scale for step in resumed.steps(1).values()
    ]


def test_each_process_records_the_ranges_of_its_own_gradients(two_processes):
    resumed, output = two_processes
    files = sorted(output.glob("gradient_ranges*"))
    assert [file.name for file in files] == [f"gradient_ranges_rank_{rank}.jsonl" for rank in range(2)]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    for step, *of_both in zip((2 * SAVED_EVERY + 2, 2 * SAVED_EVERY + 4), *lines, strict=True):
        assert [line["step"] for line in of_both] == [step, step]
        assert of_both[0]["weights"] == of_both[1]["weights"]
        assert of_both[0]["loss_scale"] == of_both[1]["loss_scale"]
        at_scale = [line["batches"][0]["loss_scales"][0] for line in of_both]
        # Each process has its own data, so the losses differ. A step is skipped if one of the two processes overflows.
        assert at_scale[0]["loss"] != at_scale[1]["loss"]
        assert resumed.steps()[step].overflow == (at_scale[0]["overflow"] or at_scale[1]["overflow"])


def test_launch_many_on_several_machines():
    script = ROOT / "scripts" / "launch" / "launch_many.sh"

    def launch(*arguments, **variables):
        environment = {**os.environ, "DRY_RUN": "1", **variables}
        return subprocess.run(["bash", script, *arguments], env=environment, capture_output=True, text=True)

    on_second = launch("8", "--config", "my.yaml", MACHINES="2", MACHINE="1", MASTER_ADDRESS="10.0.0.1")
    assert on_second.stdout.split() == [
        *("msrun", "--worker_num=16", "--local_worker_num=8", "--node_rank=1", "--master_addr=10.0.0.1"),
        *("--master_port=8118", "--join=True", "--log_dir=output/msrun"),
        *(str(ROOT / "scripts" / "launch" / "run_mindformer.py"), "--config", "my.yaml"),
    ]
    without_address = launch("8", MACHINES="2", MACHINE="1")
    assert without_address.returncode != 0
    assert all(part in without_address.stderr for part in ("MASTER_ADDRESS: must", "machine 0"))
    without_number = launch("--config", "my.yaml")
    assert without_number.returncode == 2
    parts = ("first argument", "number of processes", "got '--config'", "bash scripts/launch/launch_many.sh 2")
    assert all(part in without_number.stderr for part in parts)

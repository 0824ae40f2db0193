"""Two machines, or four processes, train in data parallel: they skip steps together, and resume after one is lost."""

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
from tests.mindformers.training_runs import LegacyFormat, Machine, TrainingRun
from tests.shared.records import assert_follows

# Each run below resumes from the run before, so run these tests in one pytest worker. tests/conftest.py puts other
# tests between the first test and the tests that wait until the lost machine is missed.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("several processes")]

# The run that is lost saves in the second format, and all other runs save in the first.
FORM, LOST = LegacyFormat("ckpt"), LegacyFormat("safetensors")
# The steps of four processes, of which the last overflows on purpose in some.
OF_FOUR, PLANTED_IN_FOUR = 12, {9, 11}
# A step of two processes has half as many samples, so MindFormers counts the steps of four twice when two go on.
BEFORE = 2 * OF_FOUR
# One of two is lost some steps after their second checkpoint, so the resumed run repeats these steps.
SAVED_EVERY = 4
SAVED = BEFORE + 2 * SAVED_EVERY
LOST_AFTER, LAST = SAVED + 3, SAVED + 16
# Steps of the resumed run in which the second process overflows on purpose.
PLANTED = {38, 39, 44, 45, 46}
RULE = AdaptiveRule(max_scale_window=4, min_scale_window=1)
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="session")
def machines():
    """Yield two network namespaces with a cable between them, which simulate machines; None if they are not allowed."""
    names = [f"machine{number}-{os.getpid()}" for number in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield [Machine(name, number, ADDRESSES[0]) for number, name in enumerate(names)]
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"Without the command 'ip' (iproute2) and CAP_SYS_ADMIN, both processes are killed instead: {error}")
        yield None
    finally:
        if shutil.which("ip") is not None:
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def as_option(value):
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()


def records(output, processes=2):
    """Return the lines of steps in the record of each process."""
    files = [output / f"loss_scale_record_rank_{rank}.jsonl" for rank in range(processes)]
    return [[line for line in read_record(file) if "step" in line] for file in files]


def assert_goes_on_after(restored, line):
    """Assert that a run has restored the state that a line of a record has after its step."""
    assert restored["loss_scale"] == line["next_loss_scale"]
    assert {name: restored[name] for name in FIELDS[5:10]} == {name: line[name] for name in FIELDS[5:10]}


def callbacks_with_overflows(rank, steps, save_every):
    """Return an option and arguments: callbacks that save and record, and make one process overflow in some steps."""
    saving = {"type": "CheckpointMonitor", "prefix": "tiny_llama", "save_checkpoint_steps": save_every}
    planted = {"type": "PlantedOverflow", "auto_register": "run_callbacks.PlantedOverflow", "rank": rank}
    callbacks = [
        {"type": "MFLossMonitor", "per_print_times": 1},
        saving | {"keep_checkpoint_max": 2, "integrated_save": False, "checkpoint_format": FORM.extension},
        {"type": "LossScaleMonitor", "all_ranks": True},
        planted | {"steps": sorted(steps)},
    ]
    return callbacks, ["--register-path", str(ROOT / "tests" / "mindformers")]


@pytest.fixture(scope="session")
def of_four(long_corpus, tmp_path_factory):
    """Train in four processes; return the output folder, and what each process has recorded and saved."""
    output = tmp_path_factory.mktemp("four") / "output"
    callbacks, arguments = callbacks_with_overflows(3, PLANTED_IN_FOUR, OF_FOUR)
    TrainingRun(output, long_corpus, {"callbacks": as_option(callbacks)}, OF_FOUR, 4, arguments=arguments).wait()
    return output, records(output, 4), [FORM.last_saved(output, rank) for rank in range(4)]


@pytest.fixture(scope="session")
def cut_off(machines, of_four, long_corpus, compiled, tmp_path_factory):
    """Resume in two processes until the second machine is lost; yield the runs and their folder.

    The processes still wait for each other. The cable between the machines is cut. Without network namespaces, there is
    one machine, whose two processes wait until :func:`until_lost` kills both.
    """
    output = tmp_path_factory.mktemp("two") / "output"
    options = LOST.save_options(output, SAVED_EVERY, keep=2) | FORM.resume_options(of_four[0])
    options["callbacks.2"] = as_option({"type": "LossScaleMonitor", "all_ranks": True})
    # Let MindSpore give up an unreachable machine after 20 seconds. By default this takes half a minute or more.
    soon = {"MS_NODE_TIMEOUT": "20", "MS_HEARTBEAT_RETRY_TIMEOUT": "20"}
    how = {"processes": 2, "by_msrun": True, "environment": soon, "compiled": compiled(2)}
    how["hold_after"] = held = LOST_AFTER - BEFORE
    runs = [TrainingRun(output, long_corpus, options, LAST, machine=machine, **how) for machine in machines or [None]]
    try:
        runs[0].wait_until(lambda: all(len(runs[-1 if rank else 0].steps(rank)) == held for rank in range(2)))
        if machines:
            ip("-n", machines[1].namespace, "link", "set", "cable", "down")
        yield runs, output
    finally:
        for run in runs:
            run.kill()


@pytest.fixture(scope="module")
def until_lost(machines, cut_off):
    """Wait until both processes have ended; return the folder, and each process's steps and records."""
    runs, output = cut_off
    if machines:
        assert [run.process.wait(120) for run in runs] == [1, 1]
    runs[0].kill()
    return output, [runs[0].steps(0), runs[-1].steps(1)], records(output)


@pytest.fixture(scope="module")
def resumed(until_lost, long_corpus, compiled):
    """Resume both processes to the end; the second overflows in steps PLANTED. Return the run and its folder."""
    output, *_ = until_lost
    # The update cell counts the steps of four once.
    callbacks, arguments = callbacks_with_overflows(1, {step - OF_FOUR for step in PLANTED}, SAVED_EVERY)
    options = {"callbacks": as_option(callbacks)} | LOST.resume_options(output)
    run = TrainingRun(output, long_corpus, options, LAST, 2, arguments=arguments, compiled=compiled(2))
    return run.wait(), output


def test_two_processes_go_on_from_checkpoints_of_four_and_save(of_four, cut_off):
    runs, output = cut_off
    for rank, run in enumerate([runs[0], runs[-1]]):
        assert_goes_on_after(run.restored_state(rank), of_four[1][0][-1])
        assert list(run.steps(rank)) == list(range(BEFORE + 1, LOST_AFTER + 1))
        assert LOST.newest_complete(output, rank) == SAVED


def test_four_processes_skip_together_and_hold_the_same(of_four):
    _, record_of_each, saved = of_four
    assert_all_skip_together(PLANTED_IN_FOUR, RULE.start(2.0**20), *record_of_each)
    assert_all_hold_the_same(saved, OF_FOUR)


def test_lost_machine_ends_both_and_both_resume(until_lost, resumed):
    _, before, recorded = until_lost
    run, output = resumed
    after = [run.steps(rank) for rank in range(2)]
    for own_before, own_after in zip(before, after, strict=True):
        assert [*own_after] == [*range(SAVED + 1, LAST + 1)]
        again = range(SAVED + 1, LOST_AFTER + 1)
        assert {step: own_after[step] for step in again} == {step: own_before[step] for step in again}
    # Each process has its own data, so the losses differ. The gradient norms and loss scales are the same.
    for first, second in (before, after):
        assert [step[1:] for step in first.values()] == [step[1:] for step in second.values()]
        assert [step.loss for step in first.values()] != [step.loss for step in second.values()]
    for rank, (old, record) in enumerate(zip(recorded, records(output), strict=True)):
        assert_goes_on_after(run.restored_state(rank), old[SAVED - BEFORE - 1])
        assert record[: len(old)] == old


def test_an_overflow_of_one_process_is_skipped_by_all(of_four, resumed):
    first, second = records(resumed[1])
    assert [line["step"] for line in first] == list(range(BEFORE + 1, LAST + 1))
    state = assert_follows(RULE, RULE.start(2.0**20), of_four[1][0])
    assert_all_skip_together(PLANTED, state, first, second)


def assert_all_skip_together(planted, state, first, *further):
    """Assert that the records of all processes skip ``planted``, follow the rule, and differ in losses only."""
    assert {line["step"] for line in first if line["overflow"]} > planted
    assert_follows(RULE, state, first)
    for record in further:
        assert [line["loss"] for line in record] != [line["loss"] for line in first]
        assert [line | {"loss": None} for line in record] == [line | {"loss": None} for line in first]


def test_both_processes_hold_the_same_weights_and_state(resumed):
    assert_all_hold_the_same([FORM.last_saved(resumed[1], rank) for rank in range(2)], LAST)


def assert_all_hold_the_same(saved_by_all, step):
    first, *further = saved_by_all
    assert first["step_num"] == step
    assert len(first) > 40
    # Each process writes its own record, so each has a different run number. Leave it out of the comparison.
    for saved in saved_by_all:
        assert saved.pop(RUN) > 0
    assert further == [first] * len(further)


def test_one_process_goes_on_from_a_checkpoint_of_two(resumed, long_corpus, tmp_path):
    # A step of one process has half as many samples as a step of two.
    before = 2 * LAST
    alone = TrainingRun(tmp_path / "alone", long_corpus, FORM.resume_options(resumed[1]), before + 2).wait()
    assert_goes_on_after(alone.restored_state(), records(resumed[1])[0][-1])
    assert list(alone.steps()) == [before + 1, before + 2]


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

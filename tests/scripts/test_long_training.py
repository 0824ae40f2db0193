"""The study of a long training: a resumed run equals an uninterrupted run, and table and picture show the results."""

import json
import shutil

import numpy as np
import pytest

from scripts.studies import harm, long_training, worth_tasks, worth_training
from scripts.studies.long_training import LongTraining
from scripts.studies.worth_tasks import SMALL_TASKS
from tests.conftest import mindspore_mode

pytestmark = pytest.mark.slow

STEPS = 7


class Small:
    """A small task in place of the demo's Llama, which takes long to compile."""

    def __init__(self, steps, **changes):
        self.held_out_batches = 0

    def __getattr__(self, name):
        return getattr(SMALL_TASKS["damped"], name)


@pytest.fixture(scope="module", autouse=True)
def in_graph_mode():
    with mindspore_mode("graph"):
        yield


def parameters_of(training):
    return {value.name: value.asnumpy().copy() for value in training.compiled.train_step.get_parameters()}


def test_a_resumed_run_is_the_one_that_was_not_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(worth_tasks, "Llama", Small)
    whole = LongTraining("guided", 0, STEPS, tmp_path / "whole.json", look_every=2)
    whole.go_on(3)
    shutil.copytree(tmp_path, tmp_path / "stopped")
    whole.go_on(STEPS)
    expected, seen = parameters_of(whole), whole.seen
    # Use the compiled graphs again. A new run resets their Parameters, so nothing of the finished run is left.
    monkeypatch.setattr(worth_training, "Trainings", lambda *_: whole.trainings)
    whole.trainings.last_ceiling = 20
    resumed = LongTraining("guided", 0, STEPS, tmp_path / "stopped" / "whole.json", look_every=2)
    assert resumed.step == 3
    resumed.go_on(STEPS)
    assert resumed.seen == seen
    assert [look["step"] for look in seen["looks"]] == [0, 2, 4, 6, 7]
    values = parameters_of(resumed)
    assert {"scale_sense", "guided_low_and_margin", "global_step"} <= set(values)
    assert list(values) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(values[name], value, err_msg=name)
    # The run keeps only its last saved state, and removes this state at the end.
    assert sorted(file.name for file in (tmp_path / "stopped").iterdir()) == ["whole-7.ckpt", "whole.json"]
    resumed.forget()
    assert list((tmp_path / "stopped").iterdir()) == []
    with pytest.raises(ValueError, match=r"unfinished run in .*'seed': 1.*Remove the file.*--unfinished"):
        LongTraining("guided", 1, STEPS, tmp_path / "whole.json")


def run(way, seed, qualities, skipped=(), ceiling=None):
    looks = [{"step": step, "quality": quality} for step, quality in zip((0, 50, 100), qualities, strict=True)]
    if ceiling is not None:
        looks = [{**look, "loss_scale": 2.0**10, "ceiling": 2.0**ceiling, "underflow": 0.0} for look in looks]
    return {"way": way, "seed": seed, "steps": 100, "skipped": list(skipped), "scales": [[0, 10.0]], "looks": looks}


def test_table_says_what_whole_runs_showed(tmp_path):
    runs = [run("fp32", seed, (5.5, 3.0, 2.0 + seed)) for seed in (0, 1)]
    runs += [run("adaptive", seed, (5.5, 3.0, 2.5 + seed), skipped=(0, 1, 60), ceiling=13) for seed in (0, 1)]
    runs.append({**run("adaptive", 2, (5.5, 3.0, 9.0)), "steps": 50})
    for each in runs:
        long_training.file_of(tmp_path, each["way"], each["seed"]).write_text(json.dumps(each))
    runs = long_training.whole_runs(tmp_path, 100)
    result = {"steps": 100, "ways": {way: list(map(long_training.summary, each)) for way, each in runs.items()}}
    lost = harm.lost_at("the demo's Llama, one of 256 micro-batches", 3.0)
    assert long_training.tables(result)["ways"][1:] == [
        ["FP32", "0 + 0, 0 + 0", "-", "-", "2.5000", "-"],
        ["adaptive", "2 + 1, 2 + 1", "3.0", lost, "3.0000", "+0.5000 ± 0.0000"],
    ]
    losses, scales = long_training.draw(runs).axes
    assert [line.get_label() for line in losses.lines] == ["FP32", "adaptive"]
    assert len(scales.patches) == 1


def test_what_is_whole_is_not_trained_again(tmp_path, monkeypatch):
    attributes = {"steps": 100, "piece": 50, "results": tmp_path, "unfinished": tmp_path / "unfinished"}
    arguments = type("Arguments", (), attributes)
    commands = []

    def train(command, **_):
        commands.append(command)
        # The training has 100 steps in two parts of 50, so the second part writes the file of the finished run.
        if len(commands) == 2:
            long_training.file_of(tmp_path, "fixed", 1).write_text("{}")

    monkeypatch.setattr(long_training.subprocess, "run", train)
    long_training.finish_run("fixed", 1, arguments)
    assert [command[1:5] for command in commands] == [
        ["-m", "scripts.studies.long_training", "--piece-of", "fixed:1"]
    ] * 2
    long_training.finish_run("fixed", 1, arguments)
    assert len(commands) == 2

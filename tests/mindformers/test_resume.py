"""Launched runs that are saved, killed and resumed take the same steps as a run that never stopped."""

import functools
import os
import random
import re
import shlex
import shutil
import time
from typing import NamedTuple

import pytest
from log_max import LogMaxRule

from mindformers_adaptive.cli import program
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.saved_state import own_keys, to_values
from tests.conftest import ROOT
from tests.mindformers.training_runs import (
    CheckpointSection,
    LegacyFormat,
    TrainingRun,
    as_parameters,
    assert_ends_with_the_parameters_of,
    assert_one_record_has_every_step_once,
)
from tests.shared.pages import ENGLISH_DOCS, blocks
from tests.shared.versions import NEEDS_SECTION

pytestmark = pytest.mark.slow

# Each rule, with its arguments in a YAML file. With hysteresis, the state of the adaptive rule has one more field.
RULES = {
    "adaptive": (
        AdaptiveRule(max_scale_window=4, min_scale_window=1, hysteresis=2),
        "type: AdaptiveLossScale, scale_factor: 2, scale_window: 1, max_scale_window: 4, min_scale_window: 1, "
        "hysteresis: 2",
    ),
    "guided": (GuidedRule(margin=0), "type: GradientGuidedLossScale, margin: 0"),
    "user's": (LogMaxRule(margin=0.25), "type: RuleLossScaleUpdateCell, rule: log_max.LogMaxRule, margin: 0.25"),
}
# The folders in which Python finds this package and the user's rule.
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "examples")])}
RECORD = "loss_scale_record.jsonl"
# An uninterrupted run saves after every SAVED_AT steps. After COPIED_AT steps, it is held and its output is copied: the
# copy has the same files as if the run had been killed.
SAVED_AT, COPIED_AT = 8, 12
# At most this many further steps until a run is killed.
UNTIL_KILLED = 8


class Training(NamedTuple):
    """Settings of a training. Runs with equal settings take the same steps."""

    rule: str
    weights: str = "float16"
    optimizer_state: bool = True
    processes: int = 1

    @property
    def form(self):
        """The checkpoint format of the uninterrupted run."""
        if not self.optimizer_state:
            return CheckpointSection(optimizer_state=False)
        return LegacyFormat("ckpt" if self.processes == 1 else "safetensors")

    def last_step(self, kills):
        # An adaptive run is killed in up to four formats, one after the other.
        return (40 if self.rule == "adaptive" else 24) + 24 * (kills - 1)


@pytest.fixture(scope="module")
def kills(request):
    """Return how often a run is killed in each format."""
    return request.config.getoption("--kills")


@pytest.fixture(scope="module")
def start(long_corpus, compiled, kills):
    """Return a function that starts a run of a training."""

    def start(training, form, output, every, resume, hold_after=None):
        scale_sense = f"{{{RULES[training.rule][1]}, loss_scale_value: 1048576}}"
        options = {"runner_wrapper.scale_sense": scale_sense, "model.model_config.param_init_type": training.weights}
        options |= form.save_options(output, every, keep=3) | resume
        graph = {"compiled": compiled(training), "environment": ENVIRONMENT, "hold_after": hold_after}
        return TrainingRun(output, long_corpus, options, training.last_step(kills), training.processes, **graph)

    return start


@pytest.fixture(scope="module")
def uninterrupted(start, tmp_path_factory):
    """Return a cached function that trains without interruption; it returns the run, its output, and the copy."""

    @functools.cache
    def train(training):
        output = tmp_path_factory.mktemp("uninterrupted") / "output"
        with start(training, training.form, output, SAVED_AT, {}, hold_after=COPIED_AT) as run:
            ranks = range(training.processes)
            run.wait_until(lambda: all(len(run.steps(rank)) == COPIED_AT for rank in ranks))
            copied = shutil.copytree(output, output.with_name("copied"))
            run.go_on()
            return run.wait(), output, copied

    return train


def replay(rule, record):
    """Return what the update cell holds before the first step and after each step, by a replay of the rule."""
    states = [rule.start(2.0**20)]
    for line in record:
        states.append(rule.step(states[-1], line["overflow"], line.get("largest_gradient")))
    held = [{"loss_scale": state.loss_scale} | to_values(rule, state, steps) for steps, state in enumerate(states)]
    # A rule that does not count clean steps does not know the step of the last overflow or raise.
    left_out = set() if rule.counts_clean_steps else {"last_overflow_iter"}
    return [{name: value for name, value in values.items() if name not in left_out} for values in held]


ADAPTIVE, GUIDED, USERS = Training("adaptive"), Training("guided"), Training("user's")
LEGACY = [LegacyFormat(extension, is_async) for extension in ("ckpt", "safetensors") for is_async in (False, True)]
SECTION = CheckpointSection()
# Trainings, and the formats in which a run saves until it is killed, one after the other. Without such formats, a run
# resumes from the copy of the uninterrupted run.
CASES = {
    "ckpt and safetensors": (ADAPTIVE, LEGACY),
    "checkpoint section": (ADAPTIVE, [SECTION, CheckpointSection(async_save=True)]),
    "checkpoint section without optimizer state": (Training("adaptive", "float32", optimizer_state=False), []),
    "guided": (GUIDED, []),
    "guided, checkpoint section": (GUIDED, [SECTION]),
    "guided, two processes": (Training("guided", "float32", processes=2), []),
    "user's rule": (USERS, []),
}


def case(name):
    marks = [NEEDS_SECTION] if "section" in name else []
    if "processes" in name:
        marks.append(pytest.mark.xdist_group("several processes"))
    return pytest.param(*CASES[name], id=name, marks=marks)


@pytest.mark.parametrize(("training", "forms"), [case(name) for name in CASES])
def test_killed_and_resumed_run_takes_the_same_steps(start, uninterrupted, kills, tmp_path, training, forms):
    reference, reference_output, copied = uninterrupted(training)
    expected, last, ranks = reference.steps(), training.last_step(kills), range(training.processes)
    assert list(expected) == list(range(1, last + 1))
    # The log does not show the whole state of the rule. So compute it by a replay.
    rule, _ = RULES[training.rule]
    values = replay(rule, read_record(reference_output / RECORD))
    assert [held["loss_scale"] for held in values[1:]] == [step.loss_scale for step in expected.values()]

    def assert_goes_on(run, complete):
        """Assert that a run goes on from a step in ``complete``, and takes the expected steps; return the last."""
        for rank in ranks:
            resumed_from = 0
            if complete != {0}:
                restored = run.restored_state(rank)
                resumed_from = restored["cur_iter"] - 1
                assert restored.items() >= values[resumed_from].items()
            assert resumed_from in complete
            steps, of_reference = run.steps(rank), reference.steps(rank)
            assert steps == {step: of_reference[step] for step in range(resumed_from + 1, max(steps) + 1)}
        return max(steps)

    output, form, resume, complete = tmp_path / "output", training.form, {}, {0}
    if not forms:
        shutil.copytree(copied, output)
        resume, complete = form.resume_options(output), {SAVED_AT}
    saved_in = [killed for killed in forms for _ in range(1 if killed.async_save else kills)]
    for number, form in enumerate(saved_in):
        before_kill = 4 if resume else SAVED_AT
        every = before_kill if form.async_save else 1
        with start(training, form, output, every, resume, hold_after=before_kill + UNTIL_KILLED) as run:
            if form.async_save:
                run.wait_until_saved(form, output)
                run.kill()
            else:
                kill_while_saving(run, form, output, before_kill, random.Random(number))
        last_taken = assert_goes_on(run, complete)
        # MindFormers rewrites the file that names the last complete checkpoint after each save. If the run was killed
        # while this file was empty, the checkpoint of the last step is already complete.
        complete = {form.newest_complete(output) or last_taken}
        if not form.async_save:
            assert complete <= {last_taken - 1, last_taken}
        if form == SECTION:
            # Empty the file that names the last complete checkpoint, as if the kill always came just after MindFormers
            # emptied it.
            form.note(output).write_text("")
            complete.add(last_taken)
        resume = form.resume_options(output)
    run = start(training, form, output, last, resume).wait()
    assert assert_goes_on(run, complete) == last

    for rank in ranks:
        saved = form.last_saved(output, rank)
        assert_ends_with_the_parameters_of(saved, training.form.last_saved(reference_output, rank))
        assert saved.items() >= as_parameters(values[last]).items()
    if training.weights == "float16":
        # The state of MindFormers' AdamW is float32, so it takes twice as many bytes as the FP16 weight.
        assert 2 * len(saved["lm_head.weight"]) == len(saved["adam_m.lm_head.weight"])
    assert_one_record_has_every_step_once(output, expected)
    assert read_record(output / RECORD) == read_record(reference_output / RECORD)
    # Runs of two processes overflow only at the start.
    first = 1 if training.processes == 2 else SAVED_AT + 1
    assert {expected[step].overflow for step in range(first, last + 1)} == {True, False}
    # A part of the state that is lost in a checkpoint is noticed, because it moves.
    names = own_keys(rule)
    assert len({tuple(held[name] for name in names) for held in values[SAVED_AT:]}) > 5
    for name in values[0] if training.rule == "adaptive" else []:
        assert len({held[name] for held in values[SAVED_AT:]}) > 1, f"the state's {name} never changes"


def kill_while_saving(run, form, output, after, delays):
    """Kill a run during its first save seen after ``after`` of its steps; if none is seen, kill it when it is held."""
    run.wait_until(lambda: len(run.steps()) >= after)
    time.sleep(delays.uniform(0, 0.1))
    names = form.names(output)
    run.wait_until(lambda: form.names(output) - names or len(run.steps()) == after + UNTIL_KILLED)
    # Most saves take only a few milliseconds, so most of these random waits are short.
    time.sleep(0.03 * delays.random() ** 4)
    run.kill()


def test_a_fixed_scale_goes_on_past_a_torn_checkpoint(uninterrupted, long_corpus, tmp_path):
    copied = shutil.copytree(uninterrupted(ADAPTIVE)[1], tmp_path / "copied")
    newest, whole = sorted((copied / "checkpoint" / "rank_0").glob("*.ckpt"), key=os.path.getmtime)[:-3:-1]
    newest.write_bytes(newest.read_bytes()[:-9])
    # In PyNative mode, these few steps need no graph.
    fixed = "{type: FixedLossScaleUpdateCell, loss_scale_value: 1024}"
    options = {"runner_wrapper.scale_sense": fixed, "context.mode": 1}
    options |= {"model.model_config.param_init_type": ADAPTIVE.weights} | ADAPTIVE.form.resume_options(copied)
    step = int(whole.stem.rpartition("_")[2])
    resumed = TrainingRun(tmp_path / "output", long_corpus, options, step + 2).wait()
    assert re.search(rf"{newest.name!r}, .* not a complete file: .* {re.escape(whole.name)}", resumed.text())
    assert {step: taken.loss_scale for step, taken in resumed.steps().items()} == {step + 1: 1024, step + 2: 1024}
    assert re.search(r"Loss scaling by FixedLossScaleUpdateCell\b.*: loss_scale 1024\.0", resumed.text())


def test_commands_of_the_page_on_own_rules_read_the_run_of_one(uninterrupted, tmp_path, monkeypatch, capsys):
    _, output, _ = uninterrupted(USERS)
    (tmp_path / "output").symlink_to(output)
    monkeypatch.chdir(tmp_path)
    [block] = [text for language, text in blocks(ENGLISH_DOCS / "own_rule.md") if language == "bash"]
    printed = {}
    for line in block.splitlines():
        _, command, *arguments = shlex.split(line)
        assert program.main([command, *arguments]) == 0
        printed[command] = capsys.readouterr().out
    mean = replay(RULES["user's"][0], read_record(output / RECORD))[-1]["mean"]
    assert f"{mean:.4g}" in printed["inspect"]
    assert re.search(r"^log_max.LogMaxRule:margin=2 ", printed["compare"], re.MULTILINE)

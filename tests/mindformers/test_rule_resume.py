"""Runs with update cells of different rules, killed and resumed, take the same steps as a run that never stopped."""

import functools
import json
import os
import re
import shlex
import shutil

import numpy as np
import pytest
from log_max import LogMaxRule

from mindformers_adaptive.cli import program
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.saved_state import all_fields
from tests.conftest import ROOT
from tests.mindformers.training_runs import (
    CheckpointSection,
    LegacyFormat,
    TrainingRun,
    assert_ends_with_the_parameters_of,
    assert_one_record_has_every_step_once,
)
from tests.shared.pages import ENGLISH_DOCS, blocks
from tests.shared.versions import NEEDS_SECTION

pytestmark = pytest.mark.slow

SAVED_AT, LAST = 8, 20
OWN = "log_max, weights in FP16"
GUIDED = (GuidedRule(margin=0), "type: GradientGuidedLossScale, margin: 0")
RULES = {
    "guided": GUIDED,
    "guided, weights in FP16": GUIDED,
    "adaptive, weights in FP16": (
        # With hysteresis, the state of the adaptive rule has one more field.
        AdaptiveRule(max_scale_window=4, min_scale_window=1, hysteresis=2),
        "type: AdaptiveLossScale, scale_factor: 2, scale_window: 1, max_scale_window: 4, min_scale_window: 1, "
        "hysteresis: 2",
    ),
    OWN: (LogMaxRule(margin=0.25), "type: RuleLossScaleUpdateCell, rule: log_max.LogMaxRule, margin: 0.25"),
}
CKPT = LegacyFormat("ckpt")
# The folders in which Python finds this package and the user's rule.
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "examples")])}


def options_of(rule, form, output):
    scale_sense = f"{{{RULES[rule][1]}, loss_scale_value: 1048576}}"
    weights = "float16" if rule.endswith("FP16") else "float32"
    changes = {"runner_wrapper.scale_sense": scale_sense, "model.model_config.param_init_type": weights}
    return form.save_options(output, every=SAVED_AT, keep=5) | changes


@pytest.fixture(scope="module")
def uninterrupted(long_corpus, compiled, tmp_path_factory):
    """Return a cached function that trains without interruption, and returns the run and its output folder."""

    @functools.cache
    def run(rule, form, processes):
        output = tmp_path_factory.mktemp("uninterrupted") / "output"
        graph = {"compiled": compiled(rule, form.optimizer_state, processes), "environment": ENVIRONMENT}
        options = options_of(rule, form, output)
        return TrainingRun(output, long_corpus, options, LAST, processes, **graph).wait(), output

    return run


def cut_back(output, form, processes):
    """Remove the checkpoints that a complete run saved after step ``SAVED_AT``, as if it had stopped at this step."""
    for rank in range(processes):
        note = form.note(output, rank)
        if isinstance(form, LegacyFormat):
            name = f"tiny_llama_rank_{rank}-1_{SAVED_AT}.{form.extension}"
            note.write_text(json.dumps({"last_epoch": 1, "last_step": SAVED_AT, "last_ckpt_file": name}))
        else:
            note.write_text(str(SAVED_AT))
        for saved in [*note.parent.glob("tiny_llama*"), *note.parent.glob("iteration_*")]:
            if int(saved.stem.rpartition("_")[2]) > SAVED_AT:
                saved.unlink() if saved.is_file() else shutil.rmtree(saved)


def replay(rule, record):
    """Replay the rule on the record's overflows and gradients; return its states at the start and after each step."""
    states = [rule.start(2.0**20)]
    for line in record:
        states.append(rule.step(states[-1], line["overflow"], line.get("largest_gradient")))
    return states


@pytest.mark.parametrize(
    ("name", "form", "processes"),
    [
        pytest.param(OWN, CKPT, 1, id="user's rule, weights in FP16"),
        pytest.param("guided", CKPT, 1, id="guided, killed"),
        pytest.param("adaptive, weights in FP16", CKPT, 1, id="adaptive, weights in FP16"),
        pytest.param(
            "guided, weights in FP16",
            CheckpointSection(),
            1,
            id="guided, weights in FP16, checkpoint section",
            marks=NEEDS_SECTION,
        ),
        pytest.param(
            "guided",
            CheckpointSection(optimizer_state=False),
            1,
            id="checkpoint section without optimizer state",
            marks=NEEDS_SECTION,
        ),
        pytest.param(
            "guided",
            LegacyFormat("safetensors"),
            2,
            id="safetensors, two processes",
            marks=pytest.mark.xdist_group("several processes"),
        ),
    ],
)
def test_stopped_and_resumed_run_takes_the_same_steps(
    uninterrupted, long_corpus, compiled, tmp_path, name, form, processes
):
    reference, reference_output = uninterrupted(name, form, processes)
    graph = {"compiled": compiled(name, form.optimizer_state, processes), "environment": ENVIRONMENT}
    expected, output = reference.steps(), tmp_path / "output"
    options = options_of(name, form, output)
    # Kill a guided run. In all other cases, resume from a copy of the checkpoints that the uninterrupted run saved by
    # step SAVED_AT.
    if (name, form) == ("guided", CKPT):
        with TrainingRun(output, long_corpus, options, LAST, hold_after=SAVED_AT + 4, **graph) as run:
            run.wait_until_saved(form, output)
        assert run.steps() == {step: expected[step] for step in run.steps()}
    else:
        cut_back(shutil.copytree(reference_output, output), form, processes)
    options |= form.resume_options(output)
    resumed = TrainingRun(output, long_corpus, options, LAST, processes, **graph).wait()
    rule, _ = RULES[name]
    carried = {"scale_sense", *(field.parameter for field in all_fields(rule))}
    for rank in range(processes):
        steps = reference.steps(rank)
        assert resumed.steps(rank) == {step: steps[step] for step in range(SAVED_AT + 1, LAST + 1)}
        saved, saved_by_reference = form.last_saved(output, rank), form.last_saved(reference_output, rank)
        assert_ends_with_the_parameters_of(saved, saved_by_reference, carried)
        if name.endswith("FP16"):
            # The state of MindFormers' AdamW is float32, so it takes twice as many bytes as the FP16 weight.
            assert 2 * len(saved["lm_head.weight"]) == len(saved["adam_m.lm_head.weight"])
    # Runs of two processes overflow only at the start, so look for overflows in the whole run.
    overflows = {expected[step].overflow for step in (resumed.steps() if processes == 1 else expected)}
    assert overflows == {True, False}

    # The run record has everything that a replay of the rule needs to reproduce the rule's states.
    assert_one_record_has_every_step_once(output, expected)
    record = read_record(output / "loss_scale_record.jsonl")
    assert record == read_record(reference_output / "loss_scale_record.jsonl")
    states = replay(rule, record)
    assert [state.loss_scale for state in states[1:]] == [step.loss_scale for step in expected.values()]
    shown = [key for field in rule.fields if field.parts or not field.shape for key in field.keys]
    for rank in range(processes):
        restored = resumed.restored_state(rank)
        assert {key: restored[key] for key in shown} == {key: getattr(states[SAVED_AT], key) for key in shown}
    for field in all_fields(rule)[: len(rule.fields)]:
        value = [getattr(states[LAST], part) for part in field.parts] or getattr(states[LAST], field.name)
        array = np.array(value, field.dtype)
        assert saved[field.parameter] == (array.tobytes() if field.shape else array.item())
    assert len(set(states[SAVED_AT:])) > 5


def test_commands_of_the_page_on_own_rules_read_the_run_of_one(uninterrupted, tmp_path, monkeypatch, capsys):
    _, output = uninterrupted(OWN, CKPT, 1)
    (tmp_path / "output").symlink_to(output)
    monkeypatch.chdir(tmp_path)
    [block] = [text for language, text in blocks(ENGLISH_DOCS / "own_rule.md") if language == "bash"]
    printed = {}
    for line in block.splitlines():
        _, command, *arguments = shlex.split(line)
        assert program.main([command, *arguments]) == 0
        printed[command] = capsys.readouterr().out
    mean = replay(LogMaxRule(margin=0.25), read_record(output / "loss_scale_record.jsonl"))[-1].mean
    assert f"{mean:.4g}" in printed["inspect"]
    assert re.search(r"^log_max.LogMaxRule:margin=2 ", printed["compare"], re.MULTILINE)

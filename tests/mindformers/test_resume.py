"""Launched runs that are saved, killed and resumed take the same steps as a run that never stopped."""

import functools
import random
import re
import shutil
import time

import pytest

from mindformers_adaptive.rules.adaptive import AdaptiveRule, LossScaleState
from mindformers_adaptive.rules.saved_state import all_fields
from tests.mindformers.training_runs import (
    CheckpointSection,
    LegacyFormat,
    TrainingRun,
    assert_ends_with_the_parameters_of,
    assert_one_record_has_every_step_once,
)
from tests.shared.versions import NEEDS_SECTION

pytestmark = pytest.mark.slow

# Run tests that share reference runs in one pytest worker.
ONE_WORKER = pytest.mark.xdist_group("resume")

# At step SAVED_AT, the window index, all counters and the overflows in a row are above 0, so a counter lost in the
# checkpoint is noticed.
SAVED_AT, LAST = 14, 40
# A run that will be killed during a save is paused this many steps before its last step.
UNTAKEN = 2

# The names of the update cell's Parameters in a checkpoint, the loss scale included.
PARAMETER_OF = {"loss_scale": "scale_sense", **{field.name: field.parameter for field in all_fields(AdaptiveRule)}}
CARRIED = {*PARAMETER_OF.values()} - {"hysteresis_budget"}


@pytest.fixture(scope="module")
def uninterrupted(long_corpus, compiled, tmp_path_factory):
    """Return a cached function that trains without interruption; it returns the run, output folder and save format."""

    @functools.cache
    def run(steps, optimizer_state):
        form = LegacyFormat("ckpt") if optimizer_state else CheckpointSection(optimizer_state=False)
        output = tmp_path_factory.mktemp("uninterrupted") / "output"
        every = SAVED_AT if steps == LAST else steps
        options = form.save_options(output, every=every, keep=5)
        graph = compiled(steps, optimizer_state)
        finished = TrainingRun(output, long_corpus, options, steps, compiled=graph).wait()
        return finished, output, form

    return run


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(LegacyFormat("ckpt"), id="ckpt", marks=ONE_WORKER),
        pytest.param(LegacyFormat("ckpt", async_save=True), id="ckpt, async", marks=ONE_WORKER),
        pytest.param(LegacyFormat("safetensors"), id="safetensors", marks=ONE_WORKER),
        pytest.param(LegacyFormat("safetensors", async_save=True), id="safetensors, async", marks=ONE_WORKER),
        pytest.param(CheckpointSection(), id="checkpoint section", marks=[NEEDS_SECTION, ONE_WORKER]),
        pytest.param(
            CheckpointSection(async_save=True), id="checkpoint section, async", marks=[NEEDS_SECTION, ONE_WORKER]
        ),
        pytest.param(
            CheckpointSection(optimizer_state=False),
            id="checkpoint section without optimizer state",
            marks=NEEDS_SECTION,
        ),
    ],
)
def test_killed_and_resumed_run_takes_the_same_steps(uninterrupted, long_corpus, compiled, tmp_path, form, request):
    in_a_save = not form.async_save and form.optimizer_state
    kills = request.config.getoption("--kills") if in_a_save else 1
    last = LAST + 25 * (kills - 1)
    reference, reference_output, reference_form = uninterrupted(last, form.optimizer_state)
    output, resumed_from, complete = tmp_path / "output", 0, set()
    expected = reference.steps()
    assert list(expected) == list(range(1, last + 1))
    # The log does not show the windows and counters of the rule, so compute them by a replay.
    states = replay([step.overflow for step in expected.values()])
    assert [state["loss_scale"] for state in states[1:]] == [step.loss_scale for step in expected.values()]

    options = form.save_options(output, every=1 if in_a_save else SAVED_AT, keep=3)
    graph = compiled(last, form.optimizer_state)
    for kill in range(kills + 1):
        resume = form.resume_options(output) if kill else {}
        # Pause the run before its last step, so that it does not end before the test kills it.
        held = last - UNTAKEN if in_a_save else SAVED_AT + 4
        hold_after = None if kill == kills else held - resumed_from
        with TrainingRun(output, long_corpus, options | resume, last, hold_after=hold_after, compiled=graph) as run:
            if kill == kills:
                run.wait()
            elif in_a_save:
                after = max(resumed_from + 1, SAVED_AT)
                kill_while_saving(run, form, output, after, held, random.Random(kill))
            else:
                run.wait_until_saved(form, output)
        if kill:
            resumed_from = run.restored_state()["cur_iter"] - 1
            assert resumed_from in complete
            assert run.restored_state() == states[resumed_from]
        steps = run.steps()
        assert steps == {step: expected[step] for step in range(resumed_from + 1, max(steps) + 1)}
        # MindFormers rewrites the file that names the last complete checkpoint after each save. If the run was killed
        # while this file was empty, the checkpoint of the last step is already complete.
        complete = {form.newest_complete(output) or max(steps)}
        if in_a_save:
            assert complete <= {max(steps) - 1, max(steps)}
            print(f"run {kill + 1} ended at step {max(steps)}; complete: {complete}; unfinished: {unfinished(output)}")
        if in_a_save and form == CheckpointSection() and kill < kills:
            # Empty the file that names the last complete checkpoint, as if the kill always came just after MindFormers
            # emptied it.
            form.note(output).write_text("")
            complete.add(max(steps))
    assert max(steps) == last
    saved = form.last_saved(output)
    assert_ends_with_the_parameters_of(saved, reference_form.last_saved(reference_output), CARRIED)
    assert {name: saved[PARAMETER_OF[name]] for name in states[last]} == states[last]
    for name in ("scale_window", "window_index", "growth_num", "down_num", "consecutive_overflows"):
        assert len({state[name] for state in states[2 * SAVED_AT :]}) > 1, f"the state's {name} never changes"
    assert_one_record_has_every_step_once(output, expected)


@ONE_WORKER
def test_a_run_goes_on_at_the_fixed_scale_of_its_file(uninterrupted, long_corpus, tmp_path):
    _, reference_output, form = uninterrupted(LAST, True)
    newest = f"tiny_llama_rank_0-1_{2 * SAVED_AT}.ckpt"
    options = {"runner_wrapper.scale_sense": "{type: NoLossScaleUpdateCell}"}
    options |= form.resume_options(reference_output, newest)
    resumed = TrainingRun(tmp_path / "output", long_corpus, options, LAST).wait()
    assert list(resumed.steps()) == list(range(2 * SAVED_AT + 1, LAST + 1))
    assert {step.loss_scale for step in resumed.steps().values()} == {1.0}
    assert re.search(r"Loss scaling by NoLossScaleUpdateCell\b.*: loss_scale 1\.0", resumed.text())


def replay(overflows, restored=None, **windows):
    """Replay the rule; return the state before the first step (initial or restored) and the state after each step."""
    windows = {"max_scale_window": 4, "min_scale_window": 1} | windows
    rule = AdaptiveRule(**windows)
    state, cur_iter = rule.start(2.0**20, scale_window=1), 1
    if restored:
        cur_iter = restored["cur_iter"]
        known = {name: value for name, value in restored.items() if name in LossScaleState._fields}
        state = state._replace(**known, clean_steps=cur_iter - 1 - restored["last_overflow_iter"])
    states = [as_restored(state, cur_iter)]
    for overflow in overflows:
        state, cur_iter = rule.step(state, overflow), cur_iter + 1
        states.append(as_restored(state, cur_iter))
    return states


def as_restored(state, cur_iter):
    counted = {"cur_iter": cur_iter, "last_overflow_iter": cur_iter - 1 - state.clean_steps}
    left_out = ("clean_steps", "hysteresis_budget")
    return {name: value for name, value in state._asdict().items() if name not in left_out} | counted


def kill_while_saving(run, form, output, after, held, delays):
    """Kill a run during its first save seen after step ``after``; if none is seen, kill the run at step ``held``."""
    run.wait_until(lambda: max(run.steps(), default=0) >= after)
    time.sleep(delays.uniform(0, 0.1))
    names = form.names(output)
    run.wait_until(lambda: form.names(output) - names or max(run.steps()) == held)
    # Most saves take only a few milliseconds, so most of these random waits are short.
    time.sleep(0.03 * delays.random() ** 4)
    run.kill()


def unfinished(output):
    """Return the names of the files that kills have left unfinished."""
    return sorted(file.name for file in output.rglob("*") if re.search(r"\.tmp$|^tmp|^\.loss", file.name))


@ONE_WORKER
def test_run_past_a_torn_checkpoint_takes_the_nearest_window(uninterrupted, long_corpus, tmp_path):
    reference, reference_output, form = uninterrupted(LAST, True)
    saved_at = 2 * SAVED_AT
    before = replay([step.overflow for step in reference.steps().values()])[saved_at]
    window, index = before["scale_window"] - 1, before["window_index"] - 1
    assert index > 0

    torn, whole = (f"tiny_llama_rank_0-1_{step}.ckpt" for step in (LAST, saved_at))
    copied = shutil.copytree(reference_output, tmp_path / "copied")
    newest = copied / "checkpoint" / "rank_0" / torn
    newest.write_bytes(newest.read_bytes()[:-9])
    options = form.resume_options(copied)
    options["runner_wrapper.scale_sense.max_scale_window"] = window
    resumed = TrainingRun(tmp_path / "output", long_corpus, options).wait()

    ladder = tuple(range(1, window + 1))
    warning = (
        f"The checkpoint has 'scale_window' {window + 1} with 'list_index' {index + 1}, but the ladder is {ladder}: "
        f"training goes on at the nearest window, {window} (index {index})."
    )
    assert resumed.text().count(warning) == 1
    assert re.search(rf"{torn!r}, .* not a complete file: .* {re.escape(str(whole))}", resumed.text())
    restored, steps = resumed.restored_state(), resumed.steps()
    assert restored == before | {"scale_window": window, "window_index": index}
    assert list(steps) == list(range(saved_at + 1, LAST + 1))
    states = replay([step.overflow for step in steps.values()], restored, max_scale_window=window)
    assert [state["loss_scale"] for state in states[1:]] == [step.loss_scale for step in steps.values()]

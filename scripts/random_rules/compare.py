"""Random rules of loss scaling, as modules that can be read, and their steps in NumPy, in lanes and in update cells.

A rule is written from a seed. Its steps are taken by ``rule.step``, by ``Lanes`` beside rules of its class with other
numbers, and by its update cell; each must give the same bits.
"""

import importlib.util
import random
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindformers_adaptive import RuleLossScaleUpdateCell
from mindformers_adaptive.rules.lanes import Lanes
from scripts.random_rules.writer import write_rule

__all__ = ["RandomRule", "compare", "make_rule", "numpy_runs", "states_of_cells"]

# Gradients of a step: ordinary ones, and all that shows nothing.
GRADIENTS = (0.25, 3.0, 1e-3, 777.0, 2.0**-126, 0.0, 1e-40, np.inf, np.nan)


class RandomRule(NamedTuple):
    """A rule that was made from a seed.

    Attributes:
        seed (int): the seed.
        path (Path): its module.
        rules (list[Rule]): of its class, with other arguments; the first is the update cell's.
        loss_scale (float): the initial one.
    """

    seed: int
    path: Path
    rules: list[Any]
    loss_scale: float


def make_rule(seed: int, folder: Path) -> RandomRule:
    """Write the module of a random rule into a folder, and return the rule.

    Raises:
        ValueError: if the rule is refused.
    """
    path = folder / f"random_rule_{seed}.py"
    path.write_text(write_rule(seed), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rules = [module.RandomRule(**arguments) for arguments in module.ARGUMENTS]
    return RandomRule(seed, path, rules, module.FIRST_LOSS_SCALE)


def compare(random_rules, steps, of_cells=None):
    """Take steps in all ways, and return for each rule "same", "noticed", or what differs.

    A rule is noticed when it computes a number nearer to 0 than 2^-126, and warns of it: devices may differ there.

    Args:
        random_rules (list[RandomRule]): share a graph in each mode of MindSpore, and the steps.
        steps (int): how many.
        of_cells (dict, optional): what :func:`states_of_cells` returned for them. Default: None, they take the steps.
    """
    results, runs = [], []
    for random_rule in random_rules:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runs.append(numpy_runs(random_rule, steps, random_rules[0].seed // 100))
            problems = lane_differences(runs[-1])
        unexpected = [
            str(warning.message) for warning in caught if "nearer to 0 than 2^-126" not in str(warning.message)
        ]
        results.append("; ".join(unexpected + problems) or ("noticed" if caught else "same"))
    for mode, of_rules in (of_cells or states_of_cells(random_rules, steps)).items():
        for lane, states in enumerate(of_rules):
            problems = [differences(*pair) for pair in zip(states, runs[lane][0].states[1:], strict=True)]
            first = next((step for step, problem in enumerate(problems) if problem), None)
            if first is not None and results[lane] != "noticed":
                results[lane] = f"{results[lane]}; {mode}, step {first + 1}: {problems[first]}".removeprefix("same; ")
    return results


def states_of_cells(random_rules, steps):
    """Return by mode of MindSpore for each rule the states of its update cell after each step."""
    path = path_of(random_rules[0].seed // 100, 0, steps)
    return {mode: cell_runs(random_rules, path, mode) for mode in ("graph", "pynative")}


class Run(NamedTuple):
    """A rule, its steps, each with its overflow and its largest gradient, and its states before and after them."""

    rule: Any
    path: list[tuple[bool, float]]
    states: list[Any]


def numpy_runs(random_rule, steps, paths):
    """Return runs by ``rule.step``: of the rule with each of its arguments, and of the first twice more.

    Args:
        random_rule (RandomRule): the rule.
        steps (int): how many.
        paths (int): the seed of the steps, the same for rules that share a graph.
    """
    rules, runs = random_rule.rules, []
    for lane, rule in enumerate([*rules, rules[0], rules[0]]):
        path, states = path_of(paths, lane, steps), [rule.start(random_rule.loss_scale)]
        for overflow, gradient in path:
            states.append(rule.step(states[-1], overflow, gradient))
        runs.append(Run(rule, path, states))
    return runs


def path_of(paths, lane, steps):
    """Return the steps of a lane, each with its overflow and its largest gradient."""
    numbers = random.Random(f"{paths} {lane}")
    return [(numbers.random() < 0.2, numbers.choice(GRADIENTS)) for _ in range(steps)]


def lane_differences(runs):
    """Return where rules side by side differ from each by itself: rules of one class, and one rule many times."""
    return [*_lane_differences(runs, "lanes"), *_lane_differences([runs[0], *runs[3:]], "lanes of one rule")]


def _lane_differences(runs, way):
    lanes = Lanes([run.rule for run in runs], [run.states[0] for run in runs])
    for number in range(len(runs[0].path)):
        overflow, gradient = zip(*(run.path[number] for run in runs), strict=True)
        lanes.step(np.array(overflow), np.array(gradient, np.float64))
        for lane, (state, run) in enumerate(zip(lanes.states(), runs, strict=True)):
            if difference := differences(state._asdict(), run.states[number + 1]):
                return [f"{way}, lane {lane}, step {number + 1}: {difference}"]
    return []


def cell_runs(random_rules, path, mode):
    """Return for each rule the states of its update cell in a mode of MindSpore after each step of a path."""
    context = {"mode": mindspore.GRAPH_MODE}
    if mode == "pynative":
        # Otherwise MindSpore's threads spin while they wait for each other, and a step takes many times as long.
        context = {"mode": mindspore.PYNATIVE_MODE, "pynative_synchronize": True}
    before = {name: mindspore.get_context(name) for name in context}
    mindspore.set_context(**context)
    try:
        shared = _SharedGraph(random_rules)
        runs = [[] for _ in random_rules]
        for overflow, gradient in path:
            shared(Tensor(overflow), Tensor(gradient, mindspore.float32))
            for run, cell in zip(runs, shared.update_cells, strict=True):
                state = cell.state()
                # Where the rule counts them, int32 as all else.
                clean_steps = np.int64(state["cur_iter"] - 1 - state["last_overflow_iter"]).astype(np.int32)
                run.append({**state, "clean_steps": int(clean_steps)})
    finally:
        mindspore.set_context(**before)
    return runs


class _SharedGraph(nn.Cell):
    """Update cells of several rules in one graph, which takes less time to compile than one for each."""

    def __init__(self, random_rules):
        super().__init__()
        cells = [RuleLossScaleUpdateCell(random_rule.loss_scale, random_rule.rules[0]) for random_rule in random_rules]
        self.update_cells = nn.CellList(cells)
        scales = [Tensor(random_rule.loss_scale, mindspore.float32) for random_rule in random_rules]
        self.scales = mindspore.ParameterTuple(
            [Parameter(scale, name=f"scale_{number}") for number, scale in enumerate(scales)]
        )
        for cell, scale in zip(cells, self.scales, strict=True):
            cell.bind_loss_scale(scale)
            if cell.needs_gradients:
                cell.declare_signal()
        self.count = len(cells)

    def construct(self, overflow, largest_gradient):
        for number in range(self.count):
            if self.update_cells[number].needs_gradients:
                ops.assign(self.update_cells[number].largest_gradient, largest_gradient)
            self.update_cells[number](self.scales[number], overflow)
        return overflow


def differences(ours, state):
    """Return the parts of a state of a rule of which a bit differs from ours, with the values; NaN equals NaN."""
    parts = state._asdict().items()
    return ", ".join(
        f"{name} {ours[name]!r}, not {theirs!r}" for name, theirs in parts if not _is_same(ours[name], theirs)
    )


def _is_same(ours, theirs):
    ours, theirs = np.array(ours, np.float64), np.array(theirs, np.float64)
    same = (ours == theirs) & (np.signbit(ours) == np.signbit(theirs))
    return bool(np.all(same | (np.isnan(ours) & np.isnan(theirs))))

"""Make random loss-scaling rules, and check that NumPy, ``Lanes`` and update cells compute the same steps.

A rule is generated from a seed. Its steps are computed in NumPy by ``rule.step``, by ``Lanes``, which steps several
rules of one class with different arguments side by side, and by its update cell. All three must give the same bits.
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

# Values for the largest gradient of a step: ordinary numbers, and numbers from which a rule can learn nothing (0, a
# subnormal number, inf and NaN).
GRADIENTS = (0.25, 3.0, 1e-3, 777.0, 2.0**-126, 0.0, 1e-40, np.inf, np.nan)


class RandomRule(NamedTuple):
    """A random rule, generated from a seed.

    Attributes:
        seed (int): the seed.
        path (Path): the file of its module.
        rules (list[Rule]): rules of the generated class with different arguments; the update cell uses the first.
        loss_scale (float): the initial loss scale.
    """

    seed: int
    path: Path
    rules: list[Any]
    loss_scale: float


def make_rule(seed: int, folder: Path) -> RandomRule:
    """Write the module of a random rule into a folder, and return the rule.

    Raises:
        ValueError: if the package refuses the rule.
    """
    path = folder / f"random_rule_{seed}.py"
    path.write_text(write_rule(seed), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rules = [module.RandomRule(**arguments) for arguments in module.ARGUMENTS]
    return RandomRule(seed, path, rules, module.FIRST_LOSS_SCALE)


def compare(random_rules, steps, of_cells=None):
    """Take steps of each rule in NumPy, in lanes and in update cells, and return a text for each rule.

    The text is "same", "noticed" or the differences. "noticed" means that the rule warned of a subnormal number (below
    2^-126). Some devices treat such a number as 0, so update cells may differ.

    Args:
        random_rules (list[RandomRule]): rules that share a graph in each mode of MindSpore, and take the same steps.
        steps (int): the number of steps.
        of_cells (dict, optional): the result of :func:`states_of_cells` for these rules. Default: None, computed.
    """
    results, runs = [], []
    for random_rule in random_rules:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runs.append(numpy_runs(random_rule, steps, random_rules[0].seed // 100))
            problems = lane_differences(runs[-1])
        unexpected = [
            str(warning.message) for warning in caught if "subnormal number (below 2^-126)" not in str(warning.message)
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
    """Return, for each mode of MindSpore, the states of each rule's update cell after each step."""
    path = path_of(random_rules[0].seed // 100, 0, steps)
    return {mode: cell_runs(random_rules, path, mode) for mode in ("graph", "pynative")}


class Run(NamedTuple):
    """A rule, its steps (overflow and largest gradient of each), and its states before and after the steps."""

    rule: Any
    path: list[tuple[bool, float]]
    states: list[Any]


def numpy_runs(random_rule, steps, paths):
    """Step each rule of ``random_rule`` by ``rule.step``; return a Run for each, then two more Runs of the first rule.

    Args:
        random_rule (RandomRule): the rule.
        steps (int): the number of steps.
        paths (int): the seed of overflows and gradients, the same for rules that share a graph.
    """
    rules, runs = random_rule.rules, []
    for lane, rule in enumerate([*rules, rules[0], rules[0]]):
        path, states = path_of(paths, lane, steps), [rule.start(random_rule.loss_scale)]
        for overflow, gradient in path:
            states.append(rule.step(states[-1], overflow, gradient))
        runs.append(Run(rule, path, states))
    return runs


def path_of(paths, lane, steps):
    """Return random steps as pairs of overflow flag and largest gradient; ``paths`` and ``lane`` seed the generator."""
    numbers = random.Random(f"{paths} {lane}")
    return [(numbers.random() < 0.2, numbers.choice(GRADIENTS)) for _ in range(steps)]


def lane_differences(runs):
    """Return, as texts, the first steps at which ``Lanes`` (rules stepped side by side) differs from ``rule.step``.

    Compare once with several rules of one class in the lanes, and once with one rule in all lanes.
    """
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
    """Return, for each rule, its update cell's states after each of the random steps, in a mode of MindSpore."""
    context = {"mode": mindspore.GRAPH_MODE}
    if mode == "pynative":
        # Without this option, MindSpore's threads spin while they wait for each other, and a step takes much longer.
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
                # A rule that counts clean steps does so in int32, so compute their number in int32 too.
                clean_steps = np.int64(state["cur_iter"] - 1 - state["last_overflow_iter"]).astype(np.int32)
                run.append({**state, "clean_steps": int(clean_steps)})
    finally:
        mindspore.set_context(**before)
    return runs


class _SharedGraph(nn.Cell):
    """Update cells of several rules in one graph, which compiles faster than a graph for each rule."""

    def __init__(self, random_rules):
        super().__init__()
        cells = [RuleLossScaleUpdateCell(random_rule.rules[0], random_rule.loss_scale) for random_rule in random_rules]
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
    """Return the fields of ``state`` that differ in any bit from ``ours``, with both values; NaN equals NaN."""
    parts = state._asdict().items()
    return ", ".join(
        f"{name} {ours[name]!r}, not {theirs!r}" for name, theirs in parts if not _is_same(ours[name], theirs)
    )


def _is_same(ours, theirs):
    ours, theirs = np.array(ours, np.float64), np.array(theirs, np.float64)
    same = (ours == theirs) & (np.signbit(ours) == np.signbit(theirs))
    return bool(np.all(same | (np.isnan(ours) & np.isnan(theirs))))

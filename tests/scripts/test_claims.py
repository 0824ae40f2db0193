"""Sentences of the documentation agree with the measured figures and with the package, in both languages."""

import functools
import importlib
import inspect
import re

import numpy as np
import pytest

from mindformers_adaptive.public_names import PUBLIC
from mindformers_adaptive.rules.formats import FLOAT16
from mindformers_adaptive.rules.guided import GuidedRule
from scripts.studies import formats_training, long_training, low_start, three_rules, worth_report
from scripts.studies.worth_report import ADAPTIVE_HIGH, GUIDED, GUIDED_HIGH, MEGATRON, OURS, WINDOW_1000
from tests.cells.beside_stock_cell import PYNATIVE_STEPS, STEPS
from tests.conftest import ROOT
from tests.shared.pages import figure

GUIDED_FROM = {OURS: GUIDED, ADAPTIVE_HIGH: GUIDED_HIGH}
FIXED = "fixed 2^16"
FP8 = "FP8, E4M3 and E5M2"


def text(page):
    """Return a page as one line of text, joined without a space where a line ends or begins in Chinese."""
    content = re.sub(r"\n +", "\n", page.read_text(encoding="utf-8"))
    return re.sub(r"(?<=[^\x00-\x7f])\n|\n(?=[^\x00-\x7f])", "", content).replace("\n", " ")


def page_of(language, name):
    if name == "README":
        return ROOT / ("README.md" if language == "en" else "README_CN.md")
    return ROOT / "docs" / language / f"{name}.md"


def tasks_by_winner(first, second, measure=worth_report.quality_of):
    """Return, for each method, the tasks in which it wins; under "-", the tasks without a significant difference."""
    won = {first: set(), second: set(), "-": set()}
    for name, task in figure("worth")["tasks"].items():
        higher = task["higher_is_better"] and measure is worth_report.quality_of
        won[worth_report.winner(worth_report.difference(task, first, second, measure), first, second, higher)].add(name)
    return won


OTHERS = ("dynamic", "guided")


def skipped_steady(rule):
    """Return how many steps of the steady trainings in README's table a rule skips."""
    steady = long_training.whole_runs(long_training.RESULTS, long_training.STEPS)
    return sum(len(run["skipped"]) for run in steady[rule])


def skipped_moving(rule):
    """Return how many steps of the trainings that move, in README's table, a rule skips."""
    return sum(run["skipped"] for run in figure("three_rules")["moves"][rule])


def differs_from_fp32(rule):
    """Return whether the results of a rule in the steady trainings are shown to differ from FP32's."""
    runs = long_training.whole_runs(long_training.RESULTS, long_training.STEPS)
    middle, half = worth_report.mean_and_interval(three_rules.ends(runs[rule]) - three_rules.ends(runs["fp32"]))
    return abs(middle) > half


def comes_back():
    """Return whether guided scaling is back at once, and adaptive scaling rises, while dynamic scaling stays."""
    data = figure("low_start")
    last = {rule: int(low_start.reached(data, rule)[2:]) for rule in low_start.RUNS}
    return int(low_start.back(data, "guided")) < 10 and last["guided"] > last["adaptive"] > last[low_start.DYNAMIC] == 0


def better_in(kind):
    """Return whether a window of 100 beats the adaptive rule on a kind of trace, in skipped steps and in bits."""
    study = figure("study")["same"]
    fixed, adaptive = study["dynamic 100"][kind], study["adaptive 20-1000"][kind]
    return [fixed[what] < adaptive[what] for what in ("skipped", "headroom_lost")]


def window_of_100_is_better_in_both():
    return {kind for kind in figure("study")["same"]["dynamic 100"] if all(better_in(kind))}


def guided_skips_fewer_steps_everywhere():
    every = set(figure("worth")["tasks"])
    return all(
        tasks_by_winner(guided, adaptive, worth_report.skipped_of)[guided] == every
        for adaptive, guided in GUIDED_FROM.items()
    )


def guided_is_worse_on_the_moving_ceiling_alone():
    return all(tasks_by_winner(guided, adaptive)[adaptive] == {"moving"} for adaptive, guided in GUIDED_FROM.items())


def guided_is_not_worse_than_dynamic():
    guided = GUIDED_FROM[OURS]
    measures = (worth_report.quality_of, worth_report.skipped_of)
    return not any(tasks_by_winner(guided, WINDOW_1000, measure)[WINDOW_1000] for measure in measures)


def guided_micro_batch_runs():
    """Return the results of the trainings that the guided rule took as one of several micro-batches."""
    tasks = figure("micro_batches")["tasks"].values()
    return [run for task in tasks for ways in task["runs"].values() for run in ways["guided"]]


def worse_without_scaling(key):
    """Return the number formats in which a task is clearly worse without loss scaling than at the best fixed scale."""
    data = figure("formats")
    verdicts = formats_training.tables(data)["verdicts"]
    return {row[1] for row in verdicts if (row[0], row[-1]) == (data["tasks"][key]["name"], "yes")}


@functools.cache
def scales_of_the_guided_rule_at_its_ceiling():
    """Return the guided rule's loss scales in 300 steps from 2^16, which is the ceiling at every step."""
    rule = GuidedRule()
    state, scales = rule.start(2.0**16), []
    for _ in range(300):
        scales.append(state.loss_scale)
        state = rule.step(state, False, largest_gradient=FLOAT16.largest / 2.0**16)
    return np.array(scales)


def start_and_next():
    return [int(scale) for scale in scales_of_the_guided_rule_at_its_ceiling()[:2]]


# Claims of the documentation about measured data. Each claim has a function that checks it against the data, and a list
# of pages with the words of the claim in English and Chinese.
SAID = {
    "a window of 100 is better in both in the random walk": (
        lambda: window_of_100_is_better_in_both() - {"mean"} == {"random walk"},
        [("figures", "kind by kind it is better in both in the random walk only", "它只在随机游走上两项都更优")],
    ),
    "a window of 100 is better in the mean": (
        lambda: all(better_in("mean")),
        [("choose", "a fixed window of 100 skips fewer steps", "固定窗口100跳过的步更少")],
    ),
    "guided skips fewer steps": (
        guided_skips_fewer_steps_everywhere,
        [
            ("evidence", "guided skips fewer steps in every task", "梯度引导在每个任务上跳过的步都更少"),
        ],
    ),
    "guided is worse on the moving ceiling alone": (
        guided_is_worse_on_the_moving_ceiling_alone,
        [
            ("evidence", "It is worse on the moving ceiling", "只在“变化的上限”上更差"),
        ],
    ),
    "guided is not worse than a window of 1000": (
        guided_is_not_worse_than_dynamic,
        [("evidence", "shown to be worse on none", "没有一个任务表明它更差")],
    ),
    "guided skips one step as one of several micro-batches": (
        lambda: sorted(run["skipped"] for run in guided_micro_batch_runs()) == [0] * 23 + [1],
        [("evidence", "skips one step in its 24 trainings", "24次训练总共只跳过一步")],
    ),
    "adaptive is not better than 2^16": (
        lambda: [len(tasks_by_winner(OURS, FIXED)[who]) for who in (OURS, FIXED)] == [0, 2],
        [
            (
                "evidence",
                "not shown to be better than a fixed 2^16 on any task",
                "未观察到自适应缩放优于固定2^16",
            ),
            ("evidence", "and was worse on two", "在两个任务上更差"),
        ],
    ),
    "the seeds of a fixed 2^16 are too far apart": (
        lambda: "moving" in tasks_by_winner(OURS, FIXED)["-"],
        [
            (
                "evidence",
                "With 2^16 the results of the seeds are too far apart to say",
                "固定2^16时各种子的结果相差太大",
            )
        ],
    ),
    "adaptive is better than low fixed scales": (
        lambda: all("moving" in tasks_by_winner(OURS, f"fixed 2^{at}")[OURS] for at in (6, 9)),
        [("evidence", "adaptive scaling is better than a fixed 2^6 and 2^9", "自适应缩放优于固定2^6和2^9")],
    ),
    "a window of 1000 is better on four tasks": (
        lambda: tasks_by_winner(ADAPTIVE_HIGH, MEGATRON)[MEGATRON] == {"damped", "zero", "auxiliary", "digits"},
        [
            (
                "evidence",
                "from the same start, 2^32, the window of 1000 is better on four tasks",
                "窗口1000在四个任务上更好",
            )
        ],
    ),
    "LoRA needs scaling in FP8 only": (
        lambda: worse_without_scaling("lora") == {FP8},
        [("formats", "needs loss scaling in FP8 only", "只在FP8中需要损失缩放")],
    ),
    "the digits need no scaling": (
        lambda: worse_without_scaling("digits") == set(),
        [("formats", "need no loss scaling in any of these formats", "在这些格式中都不需要损失缩放")],
    ),
    "dynamic scaling skips no more in the steady training": (
        lambda: skipped_steady("dynamic") <= min(skipped_steady("guided"), skipped_steady("adaptive")),
        [("README", "is right if no step is skipped after the first ones", "适用于除开头几步外没有跳过的步的训练")],
    ),
    "all rules end alike in the steady training": (
        lambda: not any(map(differs_from_fp32, ("dynamic", "adaptive", "guided"))),
        [
            ("README", "With a scale that fits, all three rules end alike", "三种规则的结果没有差别"),
            ("choose", "With a scale that fits, all rules [end alike]", "各种规则的结果[没有差别]"),
        ],
    ),
    "guided scaling skips fewest where the loss moves": (
        lambda: skipped_moving("guided") < min(skipped_moving("dynamic"), skipped_moving("adaptive")),
        [
            ("README", "is right if steps are skipped again and again", "适用于总有步被跳过"),
            ("choose", "so it rarely skips a step", "因此很少跳过步"),
        ],
    ),
    "adaptive scaling skips most": (
        lambda: all(
            skipped("adaptive") > skipped(rule) for skipped in (skipped_steady, skipped_moving) for rule in OTHERS
        ),
        [("choose", "stays nearest to the ceiling, and skips most steps", "跳过的步也最多")],
    ),
    "guided and adaptive scaling come back from a scale that is far too low": (
        comes_back,
        [
            ("README", "climbs back from a scale that is far too low", "loss scale远远过低时也能回升"),
            ("choose", "is back within a few steps", "几步之内就能恢复"),
        ],
    ),
    # The recommendation follows from two facts: the guided rule skips fewer steps than adaptive scaling in every task,
    # and it is not shown to be worse than dynamic scaling in any.
    "what is recommended": (
        lambda: guided_skips_fewer_steps_everywhere() and guided_is_not_worse_than_dynamic(),
        [
            ("choose", "is right where the ceiling moves or is unknown", "适用于上限会变化或未知的训练"),
        ],
    ),
}


@pytest.mark.parametrize("claim", SAID)
def test_the_data_bear_out_what_the_pages_say_in_both_languages(claim):
    holds, said = SAID[claim]
    assert holds()
    for name, english, in_chinese in said:
        assert english in text(page_of("en", name))
        assert in_chinese in text(page_of("zh", name))


def numbers_in(language, name, pattern):
    """Search a page for a pattern, which must match exactly once; return the integers in the groups of the match."""
    [numbers] = re.findall(pattern, text(page_of(language, name)))
    return [int(number) for number in re.findall(r"\d+", " ".join(numbers) if isinstance(numbers, tuple) else numbers)]


@pytest.mark.parametrize(
    ("language", "start"),
    [
        ("en", r"from (\d+), if the ceiling is exactly there, to (\d+)"),
        ("zh", r"从(\d+)出发、上限也恰好在此时.降到(\d+)"),
    ],
    ids=["en", "zh"],
)
def test_first_steps_of_the_guided_rule_are_as_on_the_page(language, start):
    assert numbers_in(language, "choose", start) == start_and_next()
    assert scales_of_the_guided_rule_at_its_ceiling()[-1] == start_and_next()[1]


@pytest.mark.parametrize(
    ("language", "steps"),
    [
        ("en", r"for (\d+) steps in graph mode and (\d+) in PyNative mode"),
        ("zh", r"图模式(\d+)步.PyNative模式(\d+)步"),
    ],
    ids=["en", "zh"],
)
def test_numbers_of_steps_are_those_that_trainings_take(language, steps):
    assert numbers_in(language, "compatibility", steps) == [STEPS, PYNATIVE_STEPS]


def test_platforms_of_public_names_are_proved():
    places = {name: module for names in PUBLIC.values() for name, module in names.items()}
    public = {
        name: getattr(importlib.import_module(f"mindformers_adaptive.{module}"), name.rpartition(".")[2])
        for name, module in places.items()
    }
    lists = [
        re.search(r"Supported Platforms:\s+((?:``\w+`` ?)+)", inspect.getdoc(function) or "")
        for function in public.values()
    ]
    named = [set(re.findall(r"\w+", match[1])) for match in lists if match]
    assert len(named) > 10
    assert set().union(*named) == {"Ascend", "CPU"}
    [gpu] = re.findall(r"^\| GPU \|(.*)\|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert "not run" in gpu


IMPORTS = """
import os
import sys

os.environ.pop("LOG_MF_PATH", None)
import mindformers_adaptive

print("FOUND", os.listdir(), "mindspore" in sys.modules)
mindformers_adaptive.AdaptiveLossScaleUpdateCell
print("FOUND", os.listdir(), "mindspore" in sys.modules)
import mindformers_adaptive.wrapper

print("FOUND", os.listdir(), "mindformers" in sys.modules)
"""


def test_import_loads_what_is_used_and_makes_only_one_folder(run_python, tmp_path):
    outputs = re.findall("FOUND (.*)", run_python("-c", IMPORTS).stdout)
    assert outputs == ["[] False", "[] True", "['output'] True"]
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["log"]
    said = r"`output/log`.{,30} MindFormers .{,30} current folder .{,60} `mindformers_adaptive\.wrapper`"
    assert re.search(said, text(page_of("en", "faq")))

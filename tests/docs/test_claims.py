"""Sentences of the pages are borne out by the figures, by the tests and by the package."""

import re

import pytest
from conftest import ROOT
from pages import figure

from mindformers_adaptive.rules.formats import FLOAT16
from mindformers_adaptive.rules.guided import GuidedRule
from scripts.ascend.control import PYNATIVE_STEPS, STEPS
from scripts.studies import worth_report

RECOMMENDED = (
    "Take adaptive scaling, unless skipped steps are expensive or the ceiling moves far: then take gradient-guided "
    "scaling.",
    "跳过的步代价很大或上限变动很大时",
)
# By page what it says, in English and in Chinese.
SAID = [
    ("evidence", "kind by kind it is better in both in the random walk only", "它只在随机游走上两项都更优"),
    ("choose", "a fixed window of 100 skips fewer steps and loses less headroom", "固定窗口100跳过的步更少"),
    ("choose", "it skipped fewer steps than adaptive scaling in each of our", "它跳过的步都比自适应缩放少"),
    ("choose", "no result was shown to be worse", "没有一项结果显出更差"),
    ("evidence", "guided skips fewer steps in every task", "梯度引导在每个任务上跳过的步都更少"),
    ("evidence", "is shown to be worse in none", "没有一个任务显出更差"),
    ("evidence", "not shown to be better than a fixed 2^16 on any task", "未观察到自适应缩放优于固定2^16"),
    ("evidence", "and was worse on two", "在两个任务上更差"),
    ("evidence", "adaptive scaling is better than a fixed 2^6 and 2^9", "自适应缩放优于固定2^6和2^9"),
    ("evidence", "With 2^16 the results of the seeds are too far apart to say", "固定2^16时各种子的结果相差太大"),
    ("evidence", "from the same start, 2^32, the window of 1000 is better on four tasks", "窗口1000在四个任务上更好"),
    ("formats", "needs loss scaling in FP8 only", "只在FP8中需要损失缩放"),
    ("formats", "need no loss scaling in any of these formats", "在这些格式中都不需要损失缩放"),
    ("README", "no difference between FP16 without scaling and FP32", "未观察到不缩放的FP16与FP32有差别"),
    *((page, *RECOMMENDED) for page in ("README", "choose", "rule")),
    ("choose", "from 65536, where the ceiling is just there, to 512", "从65536出发、上限也恰好在此时"),
    ("choose", "doubles in steps 3, 7, 15, 31, 62, 124 and 249", "在第3、7、15、31、62、124、249步翻倍"),
]
ADAPTIVE, FROM_FOUND = "ours, adaptive from 2^32", "ours, adaptive from the found scale"
GUIDED_FROM = {FROM_FOUND: "ours, guided from the found scale", ADAPTIVE: "ours, guided from 2^32"}
MEGATRON = "Megatron-LM's, window 1000, hysteresis 2"
# Where nothing is lost without scaling.
NEEDS_NONE = {"llama", "lora", "digits"}


def text(page):
    """A page on one line, in which Chinese needs no spaces at the ends of lines."""
    content = re.sub(r"\n +", "\n", page.read_text(encoding="utf-8"))
    return re.sub(r"(?<=[^\x00-\x7f])\n|\n(?=[^\x00-\x7f])", "", content).replace("\n", " ")


def page_of(language, name):
    if name == "README":
        return ROOT / ("README.md" if language == "en" else "README_CN.md")
    return ROOT / "docs" / language / f"{name}.md"


@pytest.mark.parametrize(("name", "english", "in_chinese"), SAID)
def test_a_page_has_the_sentence_in_both_languages(name, english, in_chinese):
    assert english in text(page_of("en", name))
    assert in_chinese in text(page_of("zh", name))


def test_the_study_bears_out_what_is_said_of_the_window_of_100():
    study = figure("study")["same"]
    adaptive, fixed = study["adaptive 20-1000"], study["dynamic 100"]
    better = {kind: [fixed[kind][what] < adaptive[kind][what] for what in fixed[kind]] for kind in fixed}
    assert {kind for kind, both in better.items() if all(both)} == {"mean", "random walk"}


def tasks_by_winner(first, second, measure=worth_report.quality_of):
    """By winner the tasks on which the interval of the difference tells one; "-" for those on which it does not."""
    found = {first: set(), second: set(), "-": set()}
    for name, task in figure("worth")["tasks"].items():
        higher = task["higher_is_better"] and measure is worth_report.quality_of
        found[worth_report.winner(worth_report.difference(task, first, second, measure), first, second, higher)].add(
            name
        )
    return found


def test_the_trainings_bear_out_who_is_better():
    for adaptive, guided in GUIDED_FROM.items():
        assert tasks_by_winner(guided, adaptive)[adaptive] == set()
        assert tasks_by_winner(guided, adaptive, worth_report.skipped_of)[guided] == set(figure("worth")["tasks"])
    against_fixed = tasks_by_winner(FROM_FOUND, "fixed 2^16")
    assert (len(against_fixed[FROM_FOUND]), len(against_fixed["fixed 2^16"])) == (0, 2)
    assert "moving" in against_fixed["-"]
    for fixed in ("fixed 2^6", "fixed 2^9"):
        assert "moving" in tasks_by_winner(FROM_FOUND, fixed)[FROM_FOUND]
    assert len(tasks_by_winner(ADAPTIVE, MEGATRON)[MEGATRON]) == 4
    assert tasks_by_winner("FP16, no scaling", "FP32")["-"] == NEEDS_NONE


def test_the_first_steps_of_the_guided_rule_are_those_of_the_page():
    rule = GuidedRule()
    state, scales = rule.start(2.0**16), []
    for _ in range(300):
        scales.append(state.loss_scale)
        state = rule.step(state, False, largest_gradient=FLOAT16.largest / 2.0**16)
    changes = [step for step in range(2, 301) if scales[step - 1] != scales[step - 2]]
    assert (scales[1], changes) == (512.0, [2, 3, 7, 15, 31, 62, 124, 249])
    assert scales[-1] == 2.0**16


def test_numbers_of_steps_are_those_of_the_tests():
    said = f"for {STEPS} steps in graph mode and {PYNATIVE_STEPS} in PyNative mode"
    assert said in text(page_of("en", "compatibility"))


def source(path):
    return (ROOT / path).read_text(encoding="utf-8")


def test_nothing_is_said_to_run_on_a_gpu():
    assert "| GPU | not run, and nothing was checked |" in source("README.md")
    files = [*(ROOT / "mindformers_adaptive").rglob("*.py"), ROOT / "setup.py", ROOT / "pyproject.toml"]
    platforms = [
        line for file in files for line in source(file).splitlines() if "``CPU``" in line or "description=" in line
    ]
    assert len(platforms) > 10
    assert [line for line in platforms if "GPU" in line] == []


def test_an_import_makes_the_folder_that_the_page_names_and_no_other(run_python, tmp_path):
    code = "import os; os.environ.pop('LOG_MF_PATH', None); import mindformers_adaptive; print('FOUND', os.listdir()); "
    code += "import mindformers_adaptive.wrapper; print('FOUND', os.listdir())"
    found = re.findall("FOUND (.*)", run_python("-c", code).stdout)
    assert found == ["[]", "['output']"]
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["log"]
    assert "MindFormers makes it in the current folder when it is imported" in text(page_of("en", "faq"))

"""A rule whose step could compute something else in MindSpore is refused when it is made; the error names the line."""

import re
import textwrap
from typing import ClassVar

import pytest
from log_max import LogMaxRule

from mindformers_adaptive.rules import Rule, float32, int32
from mindformers_adaptive.rules.fields import fields_of, form_of

RULE = """
import functools, math, random
import numpy as np
from mindformers_adaptive.rules import Rule, float32, int32

class Own(Rule):
    name = "own"
    state = {"clean": int32, "mean": float32, "vec": float32[3]}

    def make_step(self, xp):
        zero, one = xp.ints(0, 1)
        half, third, bounds = xp.floats(0.5, 1 / 3, [1, 2, 3])
        def step(loss_scale, overflow, clean, mean, vec):
BODY
            return {"loss_scale": loss_scale, "clean": clean, "mean": mean, "vec": vec}
        return step
"""
LINE = RULE[: RULE.index("BODY")].count("\n") + 1


def made(folder, body, text=RULE):
    """Write the source code of a rule to a file in a folder, and return the rule."""
    file = folder / "own_rule.py"
    source = text.replace("BODY", textwrap.indent(body, " " * 12))
    file.write_text(source)
    names = {"__name__": "own_rule"}
    exec(compile(source, str(file), "exec"), names)
    return names["Own"]()


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("if overflow: mean = half", "has an 'if', .* Use xp.where"),
        ("mean = half if overflow else mean", "has an 'if', "),
        ("mean = overflow and half", "has an 'if', 'and'"),
        ("flag = not overflow", "has an 'if'"),
        ("flag = zero < clean < one", "has an 'if', .*a < b < c"),
        ("mean = max(mean, half)", "has an 'if'"),
        ("while overflow: pass", "has an 'if'"),
        ("mean = clean / one", "uses 'divide' with int32, but it takes float32"),
        ("clean = loss_scale // half", "uses 'floor_divide' with float32, but it takes int32"),
        ("mean = mean + clean", "mixes float32 and int32 in 'add'. Use xp.int32"),
        ("mean = xp.where(overflow, mean, clean)", "mixes float32 and int32 in 'where'"),
        ("mean = xp.minimum(mean, one)", "mixes float32 and int32 in 'minimum'"),
        ("mean = 0.9 * mean + 0.1 * loss_scale", r"uses 0\.9 in 'multiply'. .*outside of the step: xp\.floats\(0\.9\)"),
        ("clean = clean + 1", r"uses 1 in 'add'. .*xp\.ints\(1\)"),
        ("mean = xp.where(overflow, mean, 0.0)", r"uses 0\.0 in 'where'"),
        ("mean = xp.where(True, mean, half)", r"uses True in 'where'"),
        ("clean = overflow + one", "mixes bool and int32 in 'add'"),
        ("flags = overflow + overflow", "uses 'add' with bool, but it takes float32 or int32"),
        ("mean = xp.where(overflow & overflow, mean, half)", r"uses & or \| on values\. Use xp\.logical_and"),
        ("clean = xp.logical_or(clean, one)", "uses 'logical_or' with int32, but it takes bool"),
        ("clean = ~clean", "uses 'invert' with int32"),
        ("clean += one", "changes a value in place, .*Write x = x \\+ y"),
        ("mean = np.sqrt(mean)", r"calls numpy\.sqrt\. Use operators"),
        ("mean = np.where(overflow, mean, half)", r"calls numpy\.where\. Use operators"),
        ("mean = mean % half", r"calls numpy\.remainder"),
        ("mean = mean**half", r"calls numpy\.power"),
        ("mean = mean.sum()", r"calls numpy\.add"),
        ("mean = vec[0]", r"uses elements of a value. Use xp\.unstack\(vector\)"),
        ("mean = sum(vec)", r"uses elements of a value"),
        ("mean = xp.floor(clean)", "uses 'floor' with int32"),
        ("clean = xp.argmin(bounds > mean)", "uses 'argmin' with bool"),
        ("mean = xp.take(vec, half)", "uses 'take' with float32"),
        ("mean = loss_scale.asnumpy()", "raises AttributeError: .*'asnumpy'"),
        ("mean = float(mean)", "raises TypeError: only "),
        ("mean = math.sqrt(mean)", "raises TypeError: only "),
        ("mean = self.nothing", "raises AttributeError: .*'nothing'"),
        ("mean = xp.nothing(mean)", "raises AttributeError: .*'nothing'"),
        ("1 / 0", "raises ZeroDivisionError: division by zero"),
        ("self.kept = mean", "raises AttributeError: The rule 'own' cannot change its 'kept'"),
        ("import mindspore; mean = mindspore.ops.abs(mean)", "raises TypeError"),
    ],
)
def test_what_a_step_must_not_do_is_refused_with_its_line(tmp_path, statement, problem):
    with pytest.raises(ValueError, match=f"^The step of the rule 'own' {problem}") as refused:
        made(tmp_path, statement)
    assert str(refused.value).endswith(f", in line {LINE} of {tmp_path / 'own_rule.py'}."), refused.value


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ('"mean": mean, ', "", "does not return 'mean'. Return the next value of each of loss_scale, clean, mean, vec"),
        ('"mean": mean, ', '"mean": mean, "meen": mean, ', "returns 'meen', but must return loss_scale, clean, mean"),
        ('"mean": mean, ', '"mean": clean, ', r"returns 'mean' as int32 of shape \(\), but it must be float32"),
        ('"mean": mean, ', '"mean": vec, ', r"returns 'mean' as float32 of shape \(3,\), .* of shape \(\)"),
        ('"mean": mean, ', '"mean": 2.0, ', "returns 'mean' as 2.0, but it must be float32"),
        (
            'return {"loss_scale"',
            'return loss_scale, {"loss_scale"',
            r"must return a dict, but returns \(<a value",
        ),
        ('return {"loss_scale": loss_scale, ', "return {", "does not return 'loss_scale'"),
        ("clean, mean, vec):", "claen, mean, vec):", "takes 'claen', which it does not get. Use some of .*clean"),
        ("clean, mean, vec):", "max_safe_exponent, mean, vec):", "takes 'max_safe_exponent', .*needs_gradients = True"),
        ("clean, mean, vec):", "exponent, clean, mean, vec):", "takes 'loss_scale', which it does not get"),
        (
            "        def step",
            "        @functools.wraps(len)\n        def step",
            r"is made by functools\.wraps",
        ),
    ],
)
def test_a_step_takes_and_returns_the_names_of_the_state(tmp_path, before, after, problem):
    assert before in RULE
    with pytest.raises(ValueError, match=f"^The step of the rule 'own' {problem}"):
        made(tmp_path, "pass", RULE.replace(before, after))


@pytest.mark.parametrize(
    ("constants", "problem"),
    [
        ("xp.ints(2**31)", r"2147483648 is not a valid int32 constant"),
        ("xp.ints(0.5)", r"0\.5 is not a valid int32 constant"),
        ("xp.ints(True)", "True is not a valid int32 constant"),
        ("xp.ints('1')", "'1' is not a valid int32 constant"),
        ("xp.floats(1e39)", r"1e\+39 is not a valid float32 constant"),
        ("xp.floats(1e-40)", r"1e-40 is not a valid float32 constant"),
        ("xp.floats([1, None])", "None is not a valid float32 constant"),
        ("xp.tabulate(lambda x: x, (0, 3))", "tabulate.* function that returns a tuple of int32"),
        ("xp.tabulate(lambda x: (x,), (0, 10**6))", r"tabulate.* at most|tabulate.*combinations"),
        ("xp.tabulate(lambda x: (1 // x,), (0, 3))", "ZeroDivisionError"),
    ],
)
def test_wrong_constants_are_refused(tmp_path, constants, problem):
    text = RULE.replace("zero, one = xp.ints(0, 1)", f"zero, one = xp.ints(0, 1); {constants}")
    with pytest.raises(ValueError, match=r"^make_step\(\) of the rule 'own' raises .*" + problem) as refused:
        made(tmp_path, "pass", text)
    assert re.search(rf", in line {LINE - 3} of ", str(refused.value))


def test_a_former_rule_is_refused_and_its_state_is_read():
    class Former(Rule):
        name = "former"
        state: ClassVar = {"clean": int32, "mean": float32}

        def next_state(self, state, seen):
            return state

    with pytest.raises(ValueError, match=r"next_state\(\), which is no longer called. Define make_step\(self, xp\)"):
        Former()
    # The layout of LogMaxRule as a version with the former form wrote it into checkpoints.
    assert form_of(LogMaxRule) == 257922410
    assert [field.parameter for field in fields_of(LogMaxRule)] == ["log_max_mean_float32", "log_max_spreads_float32_2"]

"""What the text of a rule may be made of, so that NumPy and MindSpore compute the same, on every device."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mindformers_adaptive.rules import backend

__all__ = ["check_text", "functions_of_text"]

_ALLOWED = (
    *(ast.Return, ast.Assign, ast.Tuple, ast.Dict, ast.Call, ast.Compare, ast.Name, ast.Constant, ast.expr_context),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.USub, ast.cmpop),
)

_FLAGS = "combines flags by an operator. Use logical_and, logical_or and logical_not"
_BRANCH, _LOOP = "has a branch. Use where(condition, a, b)", "has a loop. Keep several values in a field with a shape"
_INEXACT = "has an operator that devices compute differently. Use products, or a table and count"
_REFUSED: dict[type, str] = {
    **dict.fromkeys((ast.If, ast.IfExp, ast.Match), _BRANCH),
    **dict.fromkeys((ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.DictComp), _LOOP),
    **dict.fromkeys((ast.And, ast.Or, ast.Not, ast.BitAnd, ast.BitOr, ast.BitXor, ast.Invert), _FLAGS),
    **dict.fromkeys((ast.Pow, ast.Mod), _INEXACT),
}
_OTHERWISE = "has something that is no arithmetic, comparison or call of a function by its name"


def functions_of_text(text: Callable[..., Any]) -> dict[str, types.FunctionType]:
    """Return the functions that a text is made of, by name: itself, and those of its module that it calls."""
    found: dict[str, types.FunctionType] = {}
    waiting: list[Any] = [text]
    while waiting:
        function = waiting.pop()
        if isinstance(function, types.FunctionType) and function.__name__ not in found:
            found[function.__name__] = function
            named = (function.__globals__.get(name) for name in function.__code__.co_names)
            waiting += [one for one in named if getattr(one, "__module__", None) == function.__module__]
    return found


def check_text(rule: str, text: Callable[..., Any]) -> None:
    """Raise ValueError if a text has something that cannot be compiled, or not for every device.

    Args:
        rule (str): the name of the rule.
        text (Callable): the text, a function of a module.
    """
    if not isinstance(text, types.FunctionType) or text.__name__ == "<lambda>":
        raise ValueError(f"The text of the rule {rule!r} must be a function defined with def, but is {text!r}.")
    for function in functions_of_text(text).values():
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        for node, problem in _problems(tree, function.__globals__):
            line = function.__code__.co_firstlineno + node.lineno - 1
            raise ValueError(
                f"The text of the rule {rule!r} {problem}: '{ast.unparse(node)}' in line {line} of "
                f"{function.__code__.co_filename}."
            )


def _problems(function: Any, names: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield what a text must not have: the place in its syntax tree, and what is wrong with it."""
    for decorator in function.decorator_list:
        yield decorator, "has a decorator. Leave it out"
    statements = function.body if ast.get_docstring(function) is None else function.body[1:]
    nodes = [node for statement in statements for node in ast.walk(statement)]
    local = {argument.arg for argument in function.args.args}
    local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    has_dtype = {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("int32", "float32"):
            has_dtype |= {id(part) for part in ast.walk(node)}
    for node in nodes:
        kind = type(node.op) if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.BoolOp)) else type(node)
        if kind in _REFUSED:
            yield node, _REFUSED[kind]
        elif not issubclass(kind, _ALLOWED):
            yield node, _OTHERWISE
        elif isinstance(node, ast.Compare) and len(node.ops) > 1:
            yield node, "compares three values at once. Use logical_and"
        elif isinstance(node, ast.Constant) and id(node) not in has_dtype:
            yield node, "has a number without a dtype. Write int32(...) or float32(...), or name it in the module"
        elif isinstance(node, ast.Name) and node.id not in local and not _may_be_used(node.id, names):
            yield node, "uses what is neither of mindformers_adaptive.rules.backend nor of its own module"


def _may_be_used(name: str, names: Mapping[str, Any]) -> bool:
    value = names.get(name)
    if isinstance(value, (int, float, np.ndarray)):
        return True
    if isinstance(value, types.FunctionType) and value.__module__ == names["__name__"]:
        return True
    return any(value is getattr(backend, one) for one in backend.__all__)

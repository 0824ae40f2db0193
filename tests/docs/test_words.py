"""Names and phrases that a reader has to decode, in the code, its comments, its messages and the docs.

python -m tests.docs.test_words [FOLDER ...]    # list each of them with file and line
"""

import ast
import functools
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

ROOMS = ("mindformers_adaptive", "tests", "scripts", "docs/en", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
NAMES = {"one", "place", "given", "found", "told", "made", "kept", "others", "own", "rest"}
# Phrases that a reader has to decode. "there is none" (plain English) and "is None" (Python) are allowed.
_PHRASE = re.compile(r"\b(?:[Ll]ikewise|(?<!there )(?:is|are) none|of one's own|[Tt]hat of|[Tt]hose of)\b")
_TEST = re.compile(r"def (test_\w+)")
# Six or more words in a row, and a name in quotes, which interrupts such words.
_LONG = re.compile(r"(?<![\w'.])[A-Za-z]+(?:[ ,;:]+[A-Za-z]+){5,}")
_QUOTED = re.compile(r"'[^' ]*'")
# Files in which this check allows names or phrases that it rejects elsewhere, and how many it allows in each file.
ALLOWED = {
    # The attribute ``given`` of the class Format keeps its unclear name, because users of version 1.0.0 use it.
    "mindformers_adaptive/rules/formats.py": 1,
}


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the name of each variable or argument whose name does not say what it is."""
    numbers = set()
    for node in ast.walk(ast.parse(source)):
        # Constants of a rule may have the names of numbers.
        if isinstance(node, ast.Assign) and "xp.ints(" in ast.unparse(node.value):
            numbers |= {name for target in node.targets for name in ast.walk(target)}
        if node in numbers:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in NAMES:
            yield node.lineno, node.arg


def phrases_in(text: str) -> Iterator[tuple[int, str]]:
    """Find the phrases to avoid in a text, also across line breaks; yield the line number and the words of each."""
    for match in _PHRASE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match.group()


def prose_in(source: str) -> str:
    """Return the comments and strings of a Python file without the code; each keeps its line number."""
    lines = [""] * (source.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            for offset, line in enumerate(token.string.split("\n")):
                lines[token.start[0] - 1 + offset] += " " + line
    return "\n".join(lines)


@functools.cache
def decoded(room: str) -> tuple[str, ...]:
    """Return the names and phrases to avoid that a file or folder contains, each as ``file:line: words``."""
    path, entries = ROOT / room, []
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if file == Path(__file__) or file.suffix not in (".py", ".md", ".ipynb", ".sh", ".yaml"):
            continue
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        entries += [(file, *entry) for entry in phrases_in(prose_in(text) if file.suffix == ".py" else text)]
        if file.suffix == ".py":
            entries += [(file, *entry) for entry in names_in(text)]
    return tuple(f"{file.relative_to(ROOT)}:{line}: {words}" for file, line, words in entries)


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_has_to_be_decoded(room):
    counts = dict.fromkeys(ALLOWED, 0)
    left = []
    for entry in decoded(room):
        file = entry.partition(":")[0]
        counts[file] = counts.get(file, 0) + 1
        if counts[file] > ALLOWED.get(file, 0):
            left.append(entry)
    assert left == []


def test_names_of_tests_have_less_than_60_letters():
    names = {name for file in (ROOT / "tests").rglob("test_*.py") for name in _TEST.findall(file.read_text("utf-8"))}
    assert names
    assert max(map(len, names)) < 60, max(names, key=len)


def asserted_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of each string that a test looks for in a message."""
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.expr] = []
        if isinstance(node, ast.keyword) and node.arg == "match":
            parts = [node.value]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            parts = [node.left]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = node.args if node.func.attr in ("startswith", "endswith") else []
        elif isinstance(node, ast.Tuple) and any(isinstance(e, ast.Name) and e.id.endswith("Error") for e in node.elts):
            # A row of a parametrized test: arguments, the class of the error, and its message.
            parts = [element for element in node.elts if isinstance(element, ast.Constant)]
        constants = (each for part in parts for each in ast.walk(part) if isinstance(each, ast.Constant))
        yield from ((each.lineno, each.value) for each in constants if isinstance(each.value, str))


def test_asserted_messages_leave_the_wording_open():
    """A test asserts the key, the value and the remedy in a message, so that the rest can be reworded."""
    assert sorted(asserted_in('pytest.raises(E, match="a b")\nassert "c" in text')) == [(1, "a b"), (2, "c")]
    assert _LONG.findall("but a message is not to be repeated")
    assert not _LONG.findall("'a' must be .* but got 3")
    entries = []
    for file in (ROOT / "tests").rglob("*.py"):
        for line, text in asserted_in(file.read_text(encoding="utf-8")):
            entries += [f"{file.relative_to(ROOT)}:{line}: {words}" for words in _LONG.findall(_QUOTED.sub("@", text))]
    assert entries == []


def main() -> None:
    for room in sys.argv[1:] or ROOMS:
        print(*decoded(room), sep="\n")


if __name__ == "__main__":
    main()

"""Create functions from generated source code. A file holds that code for tracebacks and MindSpore's compiler."""

from __future__ import annotations

import atexit
import functools
import hashlib
import linecache
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

__all__ = ["make_function"]

# Folders with the source files of generated functions; new files go into the last folder.
_folders: list[Path] = []


def make_function(
    rule: str, arguments: Iterable[str], lines: Iterable[str], results: Iterable[str], names: dict[str, Any]
) -> Callable[..., Any]:
    """Create a function named ``step`` whose body is the given source lines.

    Args:
        rule (str): the name of the rule, which becomes a part of the file's name.
        arguments (Iterable[str]): the names of the function's arguments.
        lines (Iterable[str]): the function's statements.
        results (Iterable[str]): the expressions in the tuple that the function returns.
        names (dict[str, Any]): the function's globals; ``step`` is added to them.
    """
    head, end = f"def step({', '.join(arguments)}):", f"return ({''.join(f'{result}, ' for result in results)})"
    exec(_compiled(rule, "\n    ".join([head, *lines, end]) + "\n"), names)
    step: Callable[..., Any] = names["step"]
    return step


@functools.lru_cache(maxsize=1024)
def _compiled(rule: str, source: str) -> CodeType:
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    file = _folder() / f"{''.join(c if c.isalnum() else '_' for c in rule)}_{digest}.py"
    file.write_text(source, encoding="utf-8")
    # MindSpore reads the source of a generated function later, when a clean-up of temporary files may have deleted the
    # source file. linecache keeps an entry without a modification time (None) even if its file is gone.
    linecache.cache[str(file)] = (len(source), None, source.splitlines(keepends=True), str(file))
    return compile(source, str(file), "exec")


def _folder() -> Path:
    if not _folders or not _folders[-1].is_dir():
        _folders.append(Path(tempfile.mkdtemp(prefix="mindformers_adaptive_")))
        atexit.register(_remove, _folders[-1], os.getpid())
    return _folders[-1]


def _remove(folder: Path, process: int) -> None:
    # Only the process that created the folder of generated files removes this folder; a forked process must not.
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)

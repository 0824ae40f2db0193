"""Generated functions, each in a file, so that a traceback and MindSpore's compiler find its lines."""

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

# Folders of generated source; the last one is in use.
_folders: list[Path] = []


def make_function(
    rule: str, arguments: Iterable[str], lines: Iterable[str], results: Iterable[str], names: dict[str, Any]
) -> Callable[..., Any]:
    """Return a function ``step`` with these lines.

    Args:
        rule (str): the name of the rule, for the name of the file.
        arguments (Iterable[str]): the names of what it takes.
        lines (Iterable[str]): its statements.
        results (Iterable[str]): the expressions of what it returns, as a tuple.
        names (dict[str, Any]): its globals; the function is added.
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
    # MindSpore compiles from the source, perhaps after a cleaner of temporary files has removed it. Without a time of
    # its last change, an entry outlives its file.
    linecache.cache[str(file)] = (len(source), None, source.splitlines(keepends=True), str(file))
    return compile(source, str(file), "exec")


def _folder() -> Path:
    if not _folders or not _folders[-1].is_dir():
        _folders.append(Path(tempfile.mkdtemp(prefix="mindformers_adaptive_")))
        atexit.register(_remove, _folders[-1], os.getpid())
    return _folders[-1]


def _remove(folder: Path, process: int) -> None:
    # A forked process leaves the removal to its parent.
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)

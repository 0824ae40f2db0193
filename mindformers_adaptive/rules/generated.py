"""Generated functions, each in a file, so that a traceback and MindSpore's compiler find its lines."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

__all__ = ["make_function"]


def make_function(rule: str, source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return the function ``step`` of a source.

    Args:
        rule (str): the name of the rule, for that of the file.
        source (str): of a module that defines ``step``.
        names (dict[str, Any]): what the source uses; the function is added.

    Returns:
        Callable, with these names as its globals.
    """
    exec(_compiled(rule, source), names)
    found: Callable[..., Any] = names["step"]
    return found


@functools.lru_cache(maxsize=1024)
def _compiled(rule: str, source: str) -> CodeType:
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    file = _folder() / f"{''.join(c if c.isalnum() else '_' for c in rule)}_{digest}.py"
    file.write_text(source, encoding="utf-8")
    return compile(source, str(file), "exec")


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="mindformers_adaptive_")
    atexit.register(_remove, folder, os.getpid())
    return Path(folder)


def _remove(folder: str, process: int) -> None:
    # A forked process leaves it to the first one.
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)

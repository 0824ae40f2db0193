"""Writes the page of a training while it goes on: in a process of its own, which cannot stop it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from mindformers_adaptive.text.untrusted import printable

__all__ = ["PageWriter"]

_PACKAGES = Path(__file__).resolve().parents[2]

# A browser that shows the page of a training loads it again after so many seconds.
_REFRESH_EVERY = "30"

# How long the end of a training waits for its last page, in seconds.
_PATIENCE = 120.0


class PageWriter:
    """Writes a page from a record, by ``adaptive-loss-scale report``.

    Args:
        record (Path): of the run.
        page (Path): the file, which is replaced as a whole.
    """

    def __init__(self, record: Path, page: Path) -> None:
        self.page = page
        self._command = [sys.executable, "-m", "mindformers_adaptive", "report", str(record), "--output", str(page)]
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[Any] | None = None

    def write(self) -> str:
        """Start to write the page, unless it is being written; return what went wrong the last time, or ""."""
        if self._process is not None and self._process.poll() is None:
            return ""
        return self._outcome() or self._start(["--refresh-every", _REFRESH_EVERY])

    def finish(self) -> str:
        """Write the page of a run that has ended, and wait for it; return what went wrong, or ""."""
        # What was being written does not have the last steps.
        self._wait()
        self._outcome()
        problem = self._start([])
        self._wait()
        return problem or self._outcome()

    def _start(self, options: list[str]) -> str:
        search = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH")]))
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - it is read when the process has ended
        try:
            self._process = subprocess.Popen(
                [*self._command, *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                env={**os.environ, "PYTHONPATH": search},
            )
        except OSError as error:
            return str(error)
        return ""

    def _wait(self) -> None:
        if self._process is not None:
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _outcome(self) -> str:
        """Return what the process that has ended said of its failure, or ""."""
        process, said, self._process, self._said = self._process, self._said, None, None
        if said is None:
            return ""
        with said, contextlib.suppress(OSError):
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines() or ["it was killed"]
            return "" if process is None or process.returncode == 0 else printable(lines[-1])
        return ""

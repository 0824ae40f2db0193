"""Read the explanation of an overflow that ``LossScaleMonitor(explain=True)`` wrote beside the record of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.text.files import json_object
from mindformers_adaptive.text.untrusted import printable

__all__ = ["EXPLANATION_FILE", "explanation_of"]

EXPLANATION_FILE = "overflow_explanation.json"

# Read at most this many bytes of a file. An explanation of a large model has some hundred kilobytes.
_MOST_BYTES = 2**26
# Show at most this many lines of a summary, and this many characters of a line.
_LINES, _WIDTH = 3, 2000


def explanation_of(run: RecordedRun) -> list[str]:
    """Return the sentences of the explanation that lies beside the record of a run; an empty list if there is none.

    An explanation that names a step is left out unless that step of the run overflowed or had a bad loss: it is from an
    earlier run in the same folder.

    Args:
        run (RecordedRun): a run.
    """
    files = (Path(file).with_name(EXPLANATION_FILE) for file in run.files)
    file = next((file for file in files if file.is_file()), None)
    if file is None or run.log_format != "jsonl":
        return []
    try:
        content = json_object(file.read_text(encoding="utf-8").strip()) if file.stat().st_size <= _MOST_BYTES else {}
    except (OSError, ValueError):
        return []
    lines, step = content.get("summary") or [content.get("headline")], content.get("step")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        return []
    if step is None:
        return [f"{printable(line[:_WIDTH]).rstrip('.')}." for line in lines[:_LINES]]
    loss = run.column("loss")
    is_bad = run.skipped if loss is None else run.skipped | np.isinf(loss)
    if step not in run.last[is_bad].tolist():
        return []
    first, *later = (f"{printable(line[:_WIDTH]).rstrip('.')}." for line in lines[:_LINES])
    return [f"Step {step} was explained. {first}", *later]

"""The tutorial notebook runs as it is and gives the output that the page shows, in both languages."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, as_installed
from tests.shared.pages import ENGLISH_DOCS, chinese

TUTORIAL = ENGLISH_DOCS / "tutorial.ipynb"


def cells(notebook, kind="code"):
    return [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def outputs(notebook):
    """Return the output of each notebook cell as one text, because a stream comes in chunks."""
    return ["".join(map(shown, cell["outputs"])) for cell in cells(notebook)]


def shown(output):
    if "image/png" in output.get("data", {}):
        return "a picture"
    return "".join(output.get("text") or output["data"]["text/plain"])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="There is no pinned ipykernel for a Python before 3.11")
@pytest.mark.slow
def test_tutorial_runs_and_gives_what_it_shows(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    copy = Path(shutil.copy(TUTORIAL, tmp_path))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = as_installed({"PATH": path, "IPYTHONDIR": str(tmp_path / "ipython")})
    command = [sys.executable, "-m", "jupyter", "execute", "--inplace", copy.name]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, "\n".join([run.stderr[-2000:], (tmp_path / "train.log").read_text()[-2000:]])
    fresh, saved = outputs(copy), outputs(TUTORIAL)
    assert [bool(each) for each in fresh] == [bool(each) for each in saved]
    # Losses differ between machines in their last digits. Notebook cells 2, 4 and 6 print no losses, so their new
    # output must equal the saved output.
    for number in (2, 4, 6):
        assert fresh[number] == saved[number]
    # The keys in a line of the run's record, and the first words of the lines that `analyze` prints.
    for number, words in ((3, r"'(\w+)'"), (5, r"(?m)^[A-Z]\w+")):
        assert re.findall(words, fresh[number]) == re.findall(words, saved[number])
    assert fresh[-1].endswith("True")


def test_tutorial_is_the_same_in_chinese():
    translated = chinese(TUTORIAL)
    assert [cell["source"] for cell in cells(translated)] == [cell["source"] for cell in cells(TUTORIAL)]
    assert outputs(translated) == outputs(TUTORIAL)
    assert len(cells(translated, "markdown")) == len(cells(TUTORIAL, "markdown"))

"""The stub files (.pyi) list the public names that packages load on first use."""

from scripts.site.write_stubs import stubs
from tests.conftest import ROOT


def test_stubs_are_as_the_script_writes_them():
    files = (ROOT / "mindformers_adaptive").rglob("*.pyi")
    written = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    assert written == stubs(), "run: python -m scripts.site.write_stubs"

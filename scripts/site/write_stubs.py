"""Write the stubs that tell editors and type checkers which names a package loads on first use.

python -m scripts.site.write_stubs
"""

from pathlib import Path

from mindformers_adaptive.public_names import PUBLIC
from mindformers_adaptive.text.files import atomic_write

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "mindformers_adaptive"
# These modules import their public names themselves, so they need no stub.
EAGER = ("wrapper", "rules", "lab.replay")


def stubs():
    """Return a dict from the path of each type stub (.pyi), relative to the project's root, to the stub's text."""
    lines = {"": ["", "__version__: str"]}
    for group in PUBLIC.values():
        for name, module in group.items():
            room, _, short = name.rpartition(".")
            if room not in EAGER:
                lines.setdefault(room, []).append(f"from {PACKAGE}.{module} import {short} as {short}")
    return {
        "/".join([PACKAGE, *room.split(".")] if room else [PACKAGE]) + "/__init__.pyi": "\n".join(
            ['"""The public names, for editors and type checkers."""', "", *sorted(imports, key=_imports_first)]
        )
        + "\n"
        for room, imports in lines.items()
    }


def _imports_first(line):
    return not line.startswith("from"), line


if __name__ == "__main__":
    for file, text in stubs().items():
        with atomic_write(ROOT / file) as output:
            output.write(text)

"""Check version, change log, wheel and docs of a release, or prepare the release.

bash scripts/release.sh --check
bash scripts/release.sh 2.1.0
"""

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mindformers_adaptive.text.files import atomic_write
from scripts.studies.figures import rendered

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.compile(r'^__version__ = "(\d+)\.(\d+)\.(\d+)"$', re.MULTILINE)
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
RELEASED = re.compile(r"(\d+)\.(\d+)\.(\d+) - (\d{4}-\d\d-\d\d)")
UNRELEASED = "Unreleased"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="only check")
    action.add_argument("version", nargs="?", help="the version to release, such as 2.1.0")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel of this checkout; default: one is built")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="FOLDER", help="the checkout; default: this one")
    options = parser.parse_args()
    if options.version:
        prepare(options.root, options.version)
    problems = [*problems_of_change_log(options.root), *problems_of_docs(options.root)]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) if options.check else options.root / "dist"
        problems += problems_of_wheel(options.root, options.wheel or build(options.root, target))
    if problems:
        sys.exit("\n".join(["This cannot be released:", *(f"- {problem}" for problem in problems)]))
    print(f"Version {version_of(options.root)}: version, change log, wheel and docs agree.")


def version_of(root):
    """Return the version of the package, as in ``__init__.py``."""
    match = VERSION.search((root / "mindformers_adaptive" / "__init__.py").read_text(encoding="utf-8"))
    if match is None:
        sys.exit("mindformers_adaptive/__init__.py must have a line '__version__ = \"X.Y.Z\"'.")
    return ".".join(match.groups())


def prepare(root, version):
    """Set the version, and give the changes that are not released yet its heading and the date of today."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"The version must have the form X.Y.Z, but is {version!r}.")
    date = datetime.date.today().isoformat()
    changes = {
        "mindformers_adaptive/__init__.py": (VERSION, f'__version__ = "{version}"'),
        "CHANGELOG.md": (re.compile(rf"^## {UNRELEASED}$", re.MULTILINE), f"## {UNRELEASED}\n\n## {version} - {date}"),
    }
    for name, (pattern, replacement) in changes.items():
        text, count = pattern.subn(replacement, (root / name).read_text(encoding="utf-8"), count=1)
        if not count:
            sys.exit(f"{name} must have a line like {replacement.splitlines()[0]!r}, but has none.")
        with atomic_write(root / name) as file:
            file.write(text)


def problems_of_change_log(root):
    """Yield what is wrong with the headings of the change log."""
    first, *released = HEADING.findall((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    if first != UNRELEASED:
        yield f"CHANGELOG.md must begin with '## {UNRELEASED}', but begins with '## {first}'"
        released = [first, *released]
    matches = [RELEASED.fullmatch(heading) for heading in released]
    for heading, match in zip(released, matches, strict=True):
        if match is None:
            yield f"a heading of CHANGELOG.md must be 'X.Y.Z - YYYY-MM-DD', but is {heading!r}"
    known = [(tuple(map(int, match.groups()[:3])), match[4]) for match in matches if match]
    if known != sorted(set(known), reverse=True):
        yield "CHANGELOG.md must have each version once, the newest first"
    version = tuple(map(int, version_of(root).split(".")))
    if known and known[0][0] != version:
        newest = ".".join(map(str, known[0][0]))
        yield f"the package has version {version_of(root)}, but the newest version in CHANGELOG.md is {newest}"


def problems_of_docs(root):
    """Yield pages that only one language has, and pages whose tables differ from the data."""
    english, chinese = ({file.name for file in (root / "docs" / name).iterdir()} for name in ("en", "zh"))
    for name in sorted(english ^ chinese):
        yield f"docs/en and docs/zh must have the same pages, but only one has {name}"
    pages = [*root.glob("README*.md"), *root.glob("docs/*/*.md")]
    for page in sorted(pages):
        text = page.read_text(encoding="utf-8")
        if rendered(text, page) != text:
            yield f"{page.relative_to(root)} must show the present data: python -m scripts.studies.figures --render"


def build(root, folder):
    """Build the source distribution and, from it, the wheel; return the wheel."""
    folder.mkdir(exist_ok=True)
    sdist = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", sdist, folder], cwd=root, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()[-1]
    pip = [sys.executable, "-m", "pip", "--quiet", "--quiet", "--disable-pip-version-check"]
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / built]
    subprocess.run([*pip, *wheel], check=True)
    return max(folder.glob("*.whl"), key=lambda file: file.stat().st_mtime)


def problems_of_wheel(root, wheel):
    """Yield what a wheel lacks, or has too much, beside the package of a checkout; and a version that differs."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    package = root / "mindformers_adaptive"
    expected = {
        file.relative_to(root).as_posix()
        for pattern in ("*.py", "*.pyi", "*.html", "py.typed")
        for file in package.rglob(pattern)
    }
    for name in sorted(names ^ expected):
        yield f"the wheel {'lacks' if name in expected else 'must not have'} {name}"
    if f"\nVersion: {version_of(root)}\n" not in text:
        yield f"the wheel must have version {version_of(root)}, but is {wheel.name}"
    if (root / "README.md").read_text(encoding="utf-8").strip() not in text:
        yield "the description in the wheel must be README.md"


if __name__ == "__main__":
    main()

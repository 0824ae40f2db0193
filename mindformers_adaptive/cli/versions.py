"""What a bug report needs: versions, the platform, and whether the pair of MindSpore and MindFormers was tested."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mindformers_adaptive

# The tested pairs of MindSpore and MindFormers, as in README.md.
TESTED_PAIRS = (
    ("2.9.0", "1.9.0"),
    ("2.7.0", "1.6.0"),
    ("2.10.0", "1.9.0"),
    ("2.10.0", "2.0.0"),
    ("2.10.0", "2.1.0"),
)

_OTHERS = ("numpy", "safetensors", "tensorboardX", "matplotlib")
# The environment variable in which CANN's set_env.sh stores the folder of CANN.
_CANN = "ASCEND_HOME_PATH"


def all_versions() -> str:
    """Return the versions of packages, and the platform, without importing MindSpore or MindFormers."""
    lines = [short(), *(f"{name} {_version(name)}" for name in _OTHERS)]
    lines.append(f"Python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} processors")
    lines.append(f"CANN {os.environ.get(_CANN, f'unknown, as {_CANN} is not set')}")
    return "\n".join([*lines, f"installed in {Path(mindformers_adaptive.__file__).parent}"])


def short() -> str:
    """Return the versions of this package, MindSpore and MindFormers, without importing MindSpore or MindFormers."""
    pair = _version("mindspore"), _version("mindformers")
    tested = " or ".join(" with ".join(each) for each in TESTED_PAIRS)
    verdict = "a tested pair" if pair in TESTED_PAIRS else f"not a tested pair, which are {tested}"
    version = mindformers_adaptive.__version__
    return f"mindformers_adaptive {version}\nmindspore {pair[0]}, mindformers {pair[1]}: {verdict}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

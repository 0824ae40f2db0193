"""Errors that say what to install if an optional package is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

_MINDFORMERS = (
    "On Ascend, install the MindSpore that fits the installed CANN, and the MindFormers that fits this MindSpore; on a "
    "CPU: pip install '.[mindformers]' in the clone of this package"
)
_REMEDIES = {
    "mindspore": _MINDFORMERS,
    "mindformers": _MINDFORMERS,
    "safetensors": "Install it: pip install safetensors",
    "hyper_parallel": (
        "MindFormers 2.0.0 cannot be imported without it, and PyPI does not have it. Install the one that fits from "
        "its makers, or another MindFormers: pip install mindformers==1.9.0"
    ),
}


@contextmanager
def install_hint(purpose: str) -> Iterator[None]:
    """Turn an import error in the block into an error that says what to install.

    Args:
        purpose (str): what needs the imports, as the subject of the message.

    Raises:
        ImportError: if MindSpore, MindFormers, safetensors or hyper-parallel is not installed. Other errors pass
            unchanged.

    Examples:
        >>> with install_hint("'find'"):
        ...     raise ModuleNotFoundError("No module named 'safetensors'", name="safetensors")
        Traceback (most recent call last):
        ImportError: 'find' needs safetensors, which is not installed. Install it: pip install safetensors
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _REMEDIES:
            raise
        raise ImportError(
            f"{purpose} needs {package}, which is not installed. {_REMEDIES[package]}", name=package
        ) from error

"""Arguments of the subcommands that read a YAML file of MindFormers: the file, and changes to its keys."""

from __future__ import annotations

import argparse
from typing import Any

from mindformers_adaptive.cli.output import UsageError, read_value
from mindformers_adaptive.integration.launcher import require_yaml_file

__all__ = ["add_yaml_arguments", "read_options"]


def add_yaml_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--config`` and ``--options``."""
    parser.add_argument("--config", type=_yaml_file, required=True, help="the YAML file of MindFormers")
    parser.add_argument(
        "--options",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY.SUB=VALUE",
        help="set any key of the YAML file, after all other arguments",
    )


def read_options(pairs: list[str]) -> dict[str, Any]:
    """Return the overrides, by dotted key, that the words behind ``--options`` ask for.

    Raises:
        UsageError: if a word is not of the form ``key.sub=value``.

    Examples:
        >>> read_options(["optimizer.eps=1e-8", "runner_wrapper.scale_sense.loss_scale_value=2^16"])
        {'optimizer.eps': 1e-08, 'runner_wrapper.scale_sense.loss_scale_value': 65536.0}
    """
    overrides = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not all(key.split(".")):
            raise UsageError(f"argument --options: {pair!r} must have the form key.sub=value, as in optimizer.eps=1e-8")
        try:
            overrides[key] = read_value(value)
        except UsageError as error:
            raise UsageError(f"argument --options: {pair!r}: {error}") from error
    return overrides


def _yaml_file(text: str) -> str:
    try:
        return require_yaml_file(text)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error

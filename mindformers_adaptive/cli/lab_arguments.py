"""Arguments that ``compare`` and ``tune`` share: traces, and policies with their parameters."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mindformers_adaptive.cli.output import (
    UsageError,
    add_pattern_argument,
    integer,
    print_result,
    print_text,
    read_source,
    read_value,
    wrong_usage,
)
from mindformers_adaptive.lab.gradient_ceilings import MOST_STEPS, from_gradient_ranges
from mindformers_adaptive.lab.measures import Measures, measure
from mindformers_adaptive.lab.other_cause import other_cause
from mindformers_adaptive.lab.policies import Policy, make_policy
from mindformers_adaptive.lab.synthetic import KINDS, REGIMES, synthetic_traces
from mindformers_adaptive.lab.tuning import part_to_sweep
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.run import ASSUMPTIONS, RecordedRun, bound_shares
from mindformers_adaptive.record.run_folder import RECORD, file_in, record_in
from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules import find_rule, is_rule_name
from mindformers_adaptive.rules.formats import FLOAT16
from mindformers_adaptive.text.files import json_object, refuse_pipe
from mindformers_adaptive.text.table import counted

__all__ = ["Source", "add_trace_arguments", "cause_lines", "policy_maker", "print_sources", "read_sources"]


@dataclass(frozen=True)
class Source:
    """A trace to replay policies on, and the recorded run, if any, from which the trace was made.

    Attributes:
        trace (Trace): the trace, with the ceilings that ``--ceilings`` selects.
        run (RecordedRun, optional): the run that a log recorded; None for synthetic or measured ceilings.
        ceilings (str): how exactly the ceilings (largest loss scales without overflow) are known.
    """

    trace: Trace
    run: RecordedRun | None = None
    ceilings: str = "within bounds"

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, the source of the trace, and how much is known of its ceilings and gradients."""
        run, gradients = self.run, self.trace.largest_gradient
        known = {
            "trace": self.trace.name,
            "steps": len(self.trace),
            "ceilings": self.ceilings,
            "gradients_known": 0.0 if gradients is None else float((~np.isnan(gradients)).mean()),
        }
        if run is None:
            return known
        counts = {name: getattr(run, name) for name in ("lines_read", "lines_used", "lines_ignored", "problems")}
        bounds = {"bounds_known": bound_shares(self.trace)}
        return {**known, "format": run.log_format, **counts, **bounds}

    @property
    def recorded(self) -> Measures | None:
        """Measures, optional: the measures of the recorded run's last steps; None if the trace is not from a run."""
        if self.run is None:
            return None
        trace = part_to_sweep(self.trace)
        scale = self.run.filled_loss_scale[-len(trace) :]
        return measure(trace, np.append(scale, scale[-1]))

    def text(self) -> str:
        """Return the facts of :meth:`describe` as lines for a terminal."""
        facts = self.describe()
        start, share = f"{facts['trace']}: {counted(facts['steps'], 'step')}", facts["gradients_known"]
        shown = f"; largest gradients known at {share:.1%} of the steps" if share else ""
        if self.run is None:
            return f"{start}, ceilings {self.ceilings}{shown}"
        bounds = facts["bounds_known"]
        lines = [
            f"{start} from {counted(facts['lines_read'], 'line')} ({facts['format']}): {facts['lines_used']} used, "
            f"{facts['lines_ignored']} ignored",
            f"  ceilings bounded from below at {bounds['lower_bound']:.1%} of the steps, from above at "
            f"{bounds['upper_bound']:.1%}, else assumed{shown}",
        ]
        return "\n".join([*lines, *(f"  {problem}" for problem in self.run.problems)])


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that select traces, and the ceilings to assume where a log gives no upper bound."""
    parser.add_argument(
        "traces",
        nargs="+",
        type=read_source,
        metavar="LOG",
        help="a training log or a record of LossScaleMonitor, the output folder of a run, a folder of logs, a record "
        "of GradientRangeMonitor with loss_scales, 'synthetic' for one made-up run of each kind, or "
        "'synthetic:random walk' for one of them",
    )
    parser.add_argument(
        "--ceilings",
        choices=ASSUMPTIONS,
        help="the ceiling of a step is the largest loss scale that does not overflow. What to assume where a log does "
        "not show it: what the gradients show (the default where the log has gradients), interpolated between "
        "neighbouring skips (else the default), or the lowest or the highest that the log allows",
    )
    add_pattern_argument(parser)
    parser.add_argument("--details", action="store_true", help="print more measures, and what was read of each log")
    steps = integer(1, MOST_STEPS)
    parser.add_argument("--steps", type=steps, default=10_000, help="length of a made-up run; default: 10000")
    parser.add_argument("--seed", type=integer(0), default=0, help="random seed of a made-up run; default: 0")


def read_sources(options: argparse.Namespace, policies: Iterable[str]) -> list[Source]:
    """Read or make the traces that the command line names. Warn on stderr if a policy lacks the gradients it needs.

    Args:
        options (Namespace): the options that :func:`add_trace_arguments` declares.
        policies (Iterable[str]): names of the policies to replay on the traces, with or without parameters.

    Raises:
        OSError: if a file cannot be read.
        UsageError: if there is no such synthetic trace.
        ValueError: if a file's format is not recognised, or a folder holds no recognised file.
    """
    sources = []
    for word in options.traces:
        if word.partition(":")[0] == "synthetic":
            sources += _make(word, options.steps, options.seed)
        elif (record := Path(file_in(word, RECORD))).is_file():
            sources.append(_read_file(record, options.ceilings, options.pattern))
        elif Path(word).is_dir():
            sources += _read_folder(Path(word), options.ceilings, options.pattern)
        else:
            sources.append(_read_file(record_in(word), options.ceilings, options.pattern))
    texts = {policy.partition(":")[0]: policy for policy in policies}
    for name in filter(is_rule_name, texts):
        rule = find_rule(name)
        for source in sources:
            gradient_format = source.trace.gradient_format
            if rule.needs_gradients and gradient_format != FLOAT16 and "gradient_format" not in texts[name]:
                print(
                    f"The gradients of {source.trace.name} are in {gradient_format.name}, but rule {name!r} assumes "
                    f"float16. Give the rule the parameter gradient_format={gradient_format.name}.",
                    file=sys.stderr,
                )
            if rule.needs_gradients and source.trace.largest_gradient is None:
                print_text(
                    f"{source.trace.name} has no largest gradients, so rule {name!r} sees only overflows. A "
                    f"record of a training with {rule.cell} has them.",
                    file=sys.stderr,
                )
    return sources


def print_sources(
    options: argparse.Namespace, sources: Sequence[Source], content: Mapping[str, Any], text: str
) -> None:
    """Print the result of a subcommand and, with ``--details``, where the traces came from."""
    described = [source.describe() for source in sources]
    causes = [line for source in sources for line in cause_lines(source.run)]
    lines = [*causes, text, *(["", *(source.text() for source in sources)] if options.details else [])]
    for source in sources:
        problems = 0 if source.run is None else len(source.run.problems)
        if problems and not options.details:
            lines.append(f"{counted(problems, 'line')} of {source.trace.name} could not be read: --details")
    print_result(
        options,
        lambda: {"sources": described, **content},
        lambda: "\n".join(map(_wrapped, "\n".join(lines).split("\n"))),
    )


def _wrapped(line: str) -> str:
    """Wrap a line that ends a sentence at 100 columns; leave tables, YAML and commands as they are."""
    sentence = line.endswith((".", ":")) and not line.startswith(" ")
    return textwrap.fill(line, 100, break_long_words=False, break_on_hyphens=False) if sentence else line


def cause_lines(run: RecordedRun | None) -> list[str]:
    """Return lines that say which cause outside loss scaling the log of a run shows; an empty list if it shows none."""
    cause = None if run is None else other_cause(run)
    if run is None or cause is None:
        return []
    return [f"{run.name}: {cause.reason}", f"What to do: adaptive-loss-scale analyze {run.files[0]}", ""]


def policy_maker(text: str) -> tuple[str, Callable[[], Policy]]:
    """Return a policy's label and a function that makes it, from ``NAME`` or ``NAME:PARAMETER=VALUE,PARAMETER=VALUE``.

    Raises:
        UsageError: if there is no such policy, or it cannot take these parameters.

    Examples:
        >>> label, make = policy_maker("dynamic:scale_window=20,init_loss_scale=2^16")
        >>> label, make().loss_scale
        ('dynamic:scale_window=20,init_loss_scale=2^16', 65536.0)
    """
    name, _, listed = text.partition(":")
    parameters = {}
    for pair in filter(None, listed.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"A rule's parameter must have the form NAME=VALUE, but got {pair!r} in {text!r}.")
        if (key := key.strip()) in parameters:
            raise UsageError(f"A rule's parameter must be given once, but {key!r} has two values in {text!r}.")
        with wrong_usage(f"{pair!r}: "):
            parameters[key] = read_value(value)
    make = partial(make_policy, name, **parameters)
    with wrong_usage(f"{text!r}: "):
        make()
    return text, make


def _make(word: str, steps: int, seed: int) -> list[Source]:
    _, colon, kind = word.replace("_", " ").partition(":")
    if colon and kind not in KINDS + REGIMES:
        raise UsageError(f"A synthetic trace must be one of {', '.join(KINDS + REGIMES)}, but got {kind!r}.")
    traces = synthetic_traces(steps, seed, [kind] if colon else KINDS)
    return [Source(trace, ceilings="known") for trace in traces.values()]


def _read_file(path: Path, assume: str | None, pattern: str | None) -> Source:
    refuse_pipe(path)
    if path.suffix == ".jsonl" and _holds_sweeps(path):
        return Source(from_gradient_ranges(path), ceilings="known between the scales of a sweep")
    run = read_log(path, pattern=pattern)
    return Source(run.to_trace(assume), run)


def _holds_sweeps(path: Path) -> bool:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        return "batches" in json_object(lines.readline().strip())


def _read_folder(folder: Path, assume: str | None, pattern: str | None) -> list[Source]:
    sources = []
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        try:
            sources.append(_read_file(path, assume, pattern))
        except ValueError as error:
            print_text(f"{path} is left out: {error}", file=sys.stderr)
    if not sources:
        raise ValueError(
            f"The folder {str(folder)!r} must hold at least one log, but no file in it is recognised. Give a folder of "
            "training logs or of records of LossScaleMonitor."
        )
    return sources

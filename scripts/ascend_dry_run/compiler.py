"""Compile cases in this process, which has the environment of a dry run; program.py starts it.

    python -m ascend_dry_run.compiler LOG RESULTS CASE [CASE ...]

LOG is what this process writes its output to, and RESULTS gets a line of JSON for each case when it is compiled.
"""

import collections
import json
import os
import re
import sys
import time
from pathlib import Path

from ascend_dry_run.cases import CASES, CHIPS

__all__ = ["findings"]


def main(log, results, *names):
    import mindspore

    mindspore.set_device("Ascend")
    # With the default on a machine of one or two cores MindSpore does not build the actors of a graph with a branch.
    mindspore.runtime.dispatch_threads_num(5)
    mindspore.set_context(mode=mindspore.GRAPH_MODE, jit_config={"jit_level": "O0"})
    world = CASES[names[0]].world
    if world.ranks > 1:
        mindspore.communication.init()
        mindspore.set_auto_parallel_context(
            parallel_mode=world.mode,
            pipeline_stages=world.stages,
            enable_parallel_optimizer=world.shards_optimizer,
            gradients_mean=True,
        )
    from ascend_dry_run import steps

    for name in names:
        case = CASES[name]
        os.environ["DRY_RUN_CHIP"] = CHIPS[case.chip]
        log_before, start = Path(log).stat().st_size, time.monotonic()
        error = ""
        try:
            getattr(steps, case.function)(**case.arguments)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.monotonic() - start
        found = findings(Path(log).read_bytes()[log_before:].decode(errors="replace"))
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps({"case": name, "error": error, "seconds": round(seconds, 1), **found}) + "\n")
    # MindSpore has threads that would wait for a device.
    os._exit(0)


def findings(log):
    """Return what MindSpore's log says of a compilation.

    Returns:
        dict: ``kernels``, a dict of counts by operator for each type of kernel, and ``moved``, the operators for which
        there is no kernel on an Ascend but one on the CPU.
    """
    kernels = collections.defaultdict(collections.Counter)
    for operator, kind in re.findall(r"kernel opname:(\w+), kernel type:(\w+)", log):
        kernels[kind][operator] += 1
    moved = re.findall(r"Try to use backoff CPU kernel, node:(\S+)", log)
    return {
        "kernels": {kind: dict(sorted(counts.items())) for kind, counts in sorted(kernels.items())},
        "moved": sorted({re.search(r"(\w+?)(?:-op\d+)?$", node.rstrip(",.;")).group(1) for node in moved}),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])

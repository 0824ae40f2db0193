"""Compile test cases for an Ascend. The script program.py starts this one in a new process, as a dry run.

    python -m scripts.ascend.compiler LOG RESULTS CASE [CASE ...]

LOG is the file with the output of this process. RESULTS is a file that gets a line of JSON for each compiled case.
"""

import collections
import gc
import json
import math
import os
import re
import sys
import time
from pathlib import Path

from scripts.ascend.cases import CASES, CHIPS

# The folder where MindSpore saves the graphs of this process, and the file names of the finished graphs.
GRAPHS, LAST_GRAPHS = "graphs", "graph_build*.ir"
_COLLECTIVE = (
    r"\) = (All\w+|Reduce\w*|Broadcast|Send|Receive)\(.*?\) (?:\{instance name: \w+\} )?primitive_attrs: \{(.*)\}.*\n"
    r" *: \((.*)\) -> "
)
_BYTES = {"Float16": 2, "BFloat16": 2, "Float32": 4, "Int32": 4, "Int64": 8, "Bool": 1, "Int8": 1, "UInt8": 1}


def main(log, results, *names):
    import mindspore

    mindspore.set_device("Ascend")
    # With the default number of threads on one or two cores, MindSpore fails to build a graph with a branch.
    mindspore.runtime.dispatch_threads_num(5)
    mindspore.set_context(mode=mindspore.GRAPH_MODE, jit_config={"jit_level": "O0"})
    if CASES[names[0]].world.ranks > 1 and CASES[names[0]].function != "launched":
        mindspore.communication.init()
    from scripts.ascend import steps

    # MindSpore collects garbage before it compiles a graph. Freeze all modules, so that the collection skips them.
    gc.collect()
    gc.freeze()
    for name in names:
        case = CASES[name]
        os.environ["DRY_RUN_CHIP"] = CHIPS[case.chip]
        if case.world.ranks > 1 and case.function != "launched":
            share_work(case.world)
        graphs_before, log_before = set(Path(GRAPHS).rglob(LAST_GRAPHS)), Path(log).stat().st_size
        error, start = "", time.monotonic()
        try:
            getattr(steps, case.function)(**case.arguments)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = round(time.monotonic() - start, 1)
        written = Path(log).read_bytes()[log_before:].decode(errors="replace")
        graphs = [file.read_text() for file in sorted({*Path(GRAPHS).rglob(LAST_GRAPHS)} - graphs_before)]
        result = {"case": name, "error": error, "seconds": seconds, **kernels_in(written)}
        result["collectives"] = sum(map(collectives_in, graphs), collections.Counter())
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    # Exit without cleanup, because threads of MindSpore would wait for a device.
    os._exit(0)


def share_work(world):
    import mindspore

    mindspore.reset_auto_parallel_context()
    mindspore.set_auto_parallel_context(
        parallel_mode=world.mode,
        pipeline_stages=world.stages,
        enable_parallel_optimizer=world.shards_optimizer,
        gradients_mean=True,
    )


def kernels_in(log):
    """Return the kernels of a compilation, read from MindSpore's log.

    Returns:
        dict: ``kernels``, a dict of counts by operator for each type of kernel, and ``moved``, the operators that
        have a kernel on the CPU but not on an Ascend.
    """
    kernels = collections.defaultdict(collections.Counter)
    for operator, kind in re.findall(r"kernel opname:(\w+), kernel type:(\w+)", log):
        kernels[kind][operator] += 1
    moved = re.findall(r"Try to use backoff CPU kernel, node:(\S+)", log)
    return {
        "kernels": {kind: dict(sorted(counts.items())) for kind, counts in sorted(kernels.items())},
        "moved": sorted({re.search(r"(\w+?)(?:-op\d+)?$", node.rstrip(",.;")).group(1) for node in moved}),
    }


def collectives_in(graph):
    """Return the collectives by which processes exchange data, from the text of a compiled graph.

    Returns:
        dict[str, int]: the number of calls for each description, such as "AllReduce max of 4 bytes by all". "by a part"
        may mean a single process, which then sends nothing.
    """
    copies = collections.Counter()
    for operator, attributes, inputs in re.findall(_COLLECTIVE, graph):
        reduction = re.search(r'\bop: "(\w+)"', attributes)
        sizes = [
            _BYTES[dtype] * math.prod(map(int, re.findall(r"\d+", shape)))
            for dtype, shape in re.findall(r"Tensor\[(\w+)\]>?, \(([\d, ]*)\)", inputs)
        ]
        name = f"{operator} {reduction[1]}" if reduction else operator
        by = "all" if 'group: "hccl_world_group"' in attributes else "a part"
        copies[f"{name} of {sum(sizes)} bytes by {by}"] += 1
    return copies


if __name__ == "__main__":
    main(*sys.argv[1:])

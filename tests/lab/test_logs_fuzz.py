"""However a log is mutilated, the readers raise nothing but the error they document, and no line is lost count of."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_logs_reading import DEEPSPEED, MEGATRON, MINDFORMERS

from mindformers_adaptive.lab.logs import FORMATS, read_log
from mindformers_adaptive.lab.recorded_run import ASSUMPTIONS

RECORD = [
    json.dumps({"step": step, "overflow": step % 3 == 0, "loss_scale": 8.0, "next_loss_scale": 4.0, "loss": 1.5})
    for step in range(1, 9)
] + ['{"missing_steps": 2, "first_step": 9, "last_step": 10}']
SAMPLES = {"jsonl": RECORD, "mindformers": MINDFORMERS[:12], "megatron": MEGATRON[:12], "deepspeed": DEEPSPEED}
PIECES = st.sampled_from(
    ["", "9" * 25, "999999", "0", "-1", "nan", "inf", "1e400", "\x1b[31m", "\r", "|", "step:[", "iteration 7/ 9 |", "{"]
)


@st.composite
def mutilated(draw, lines):
    """Lines dropped, doubled, moved and cut, with pieces of text or bytes put in place of some of their own."""
    kept = draw(st.lists(st.sampled_from(lines), min_size=1, max_size=20))
    result = []
    for line in kept:
        for _ in range(draw(st.integers(0, 2))):
            start = draw(st.integers(0, len(line)))
            end = draw(st.integers(start, min(start + 12, len(line))))
            line = line[:start] + draw(PIECES | st.text(max_size=3)) + line[end:]
        result.append(
            line.encode("utf-8", "surrogatepass") + draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"", b"\xff\n"]))
        )
    return b"".join(result)


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=150)
@given(data=st.data())
def test_mutilated_logs_raise_only_value_errors_and_every_line_is_counted(name, data, tmp_path_factory):
    content = data.draw(mutilated(SAMPLES[name]))
    log = tmp_path_factory.getbasetemp() / f"mutilated_{name}.log"
    log.write_bytes(content)
    lines = content.count(b"\n") + (not content.endswith(b"\n") and content != b"")
    for chosen in (None, *FORMATS):
        try:
            run = read_log(log, chosen)
        except ValueError as error:
            assert "The log must" in str(error)  # noqa: PT017
            continue
        assert run.lines_read == run.lines_used + run.lines_ignored == lines
        assert len(run) >= 1
        assert all(f"mutilated_{name}.log:" in problem for problem in run.problems)
        assert not (run.loss_scale <= 0).any()
        for assume in ASSUMPTIONS:
            ceiling = run.to_trace(assume).ceiling
            assert not np.isnan(ceiling).any()

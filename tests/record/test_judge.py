"""Nothing false is said about a log: random runs are written as programs write them, and each sentence is judged."""

import numpy as np
import pytest

from tests.record.judge import Truth, judge_seed, judge_text
from tests.record.program_logs import PROGRAMS, Log
from tests.record.true_runs import Part, Run


def test_no_sentence_and_no_field_is_false(tmp_path, request):
    """By default, the runs of 60 seeds are judged; ``--judged 2000`` judges more of them."""
    names, wrong = set(), {}
    for seed in range(request.config.getoption("--judged")):
        name, faults = judge_seed(seed, tmp_path)
        names.add(name)
        wrong |= {seed: (name, faults)} if faults else {}
    assert wrong == {}
    assert names == set(PROGRAMS)


# A run of 40 steps: the first two are skipped, and the loss scale rises once, after step 22.
USED = 2.0 ** np.array([18, 17, *[16] * 20, *[17] * 18])
FLAGS = np.arange(40) < 2
PART = Part(1, FLAGS, USED, np.append(USED[1:], 2.0**17), np.full(40, 2.5), np.ones(40), np.full(40, 2.0**16))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("2 of 40 steps were skipped (5.0%).", "3 of 40 steps were skipped (7.5%)."),
        ("2 of 40 steps were skipped (5.0%).", "2 of 41 steps were skipped (4.9%)."),
        ("At most 2 of 40 steps were skipped (0.0% to 5.0%).", "At most 1 of 40 steps were skipped (0.0% to 2.5%)."),
        ("The loss scale fell from 2^18 to 2^17.", "The loss scale fell from 2^18 to 2^16."),
        ("The loss scale settled between 2^16 and 2^17.", "The loss scale settled at 2^17."),
        ("Its falls add up to at least 2 halvings.", "Its falls add up to at least 3 halvings."),
        ("2 steps were skipped before step 3.", "1 step was skipped before step 3."),
        (
            "From step 3 on, 2^16 held: 20 steps in a row were not skipped.",
            "From step 22 on, 2^17 held: 20 steps in a row were not skipped.",
        ),
        (
            "The log shows nothing that should be changed.",
            "No loss scale has held: no 20 steps in a row were without overflow.",
        ),
    ],
)
def test_the_judge_knows_right_from_wrong(right, wrong):
    truth = Truth(Run([PART]), Log([], is_exact=True), 1, 40)
    assert list(judge_text(truth, right)) == []
    assert list(judge_text(truth, f"{right} {wrong}")) == [wrong]
    assert list(judge_text(truth, f"{wrong} The sky is blue.")) == [wrong, "not listed: The sky is blue."]

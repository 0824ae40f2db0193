"""Checks of what a command shows while the lines of MindFormers go to a file."""

import re


def assert_quiet(finished, log):
    """Assert that a finished command has shown about ten lines of progress, and none of the lines in its log file."""
    shown = finished.stdout + finished.stderr
    assert f"{log.name}; --verbose" in finished.stderr
    assert (" - INFO - " in shown, "\x1b" in shown, "\r" in shown) == (False, False, False)
    assert " - INFO - " in log.read_text()
    # About ten lines of progress, and no bar.
    progress = re.findall(
        r"^(?:steps|backward passes): (\d+) of (\d+)(?:, loss [\d.]+, loss scale \S+, skipped \d+)?$",
        finished.stderr,
        re.MULTILINE,
    )
    assert 5 <= len(progress) <= 10

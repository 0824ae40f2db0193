"""The loop on the page about own loops takes every step once, wherever it is stopped and started again."""

import json

from tests.shared.pages import blocks_in


def record_of_steps():
    with open("loss_scale_record.jsonl", encoding="utf-8") as lines:
        return [row for row in map(json.loads, lines) if "loss" in row]


def test_no_step_of_the_loop_is_lost_or_done_twice(graph_mode, tmp_path, monkeypatch, capsys):
    # The page's code stops at step 17, goes on to step 40, and prints the analysis of its record.
    [code] = [text for name, text in blocks_in("python").items() if "own_loop" in name and "RunRecord(" in text]
    (tmp_path / "stopped").mkdir()
    monkeypatch.chdir(tmp_path / "stopped")
    names = {}
    exec(compile(code, "own_loop.md", "exec"), names)
    assert "2 of 40 steps were skipped (5.0%)" in capsys.readouterr().out
    train, stopped = names["train"], record_of_steps()
    assert [row["step"] for row in stopped] == list(range(1, 41))
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    train(40)
    keys = ("step", "loss", "overflow", "loss_scale", "next_loss_scale", "scale_window", "skipped_steps")
    assert [[row[key] for key in keys] for row in stopped] == [[row[key] for key in keys] for row in record_of_steps()]
    # Start the loop again at each place where it can stop: before, at and after a checkpoint.
    monkeypatch.chdir(tmp_path / "stopped")
    for last_step in (9, 40, 44, 51):
        train(last_step)
    assert [row["step"] for row in record_of_steps()] == list(range(1, 52))

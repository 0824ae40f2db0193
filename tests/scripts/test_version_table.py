"""The table of versions adds up what pytest printed, and says where the tests did not end."""

import pytest
import version_table


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("...\n== 1 failed, 20 passed, 2 skipped in 3.00s ==\n", {"failed": 1, "passed": 20, "skipped": 2}),
        ("===== 415 passed, 3 deselected in 1063.16s (0:17:43) =====\n", {"passed": 415}),
        ("3 passed in 0.10s\n", {"passed": 3}),
        ("E   assert 3 == 4\nINTERNALERROR> killed\n", {}),
    ],
)
def test_counts_are_those_of_the_last_line(text, counts):
    assert version_table.read_counts(text) == counts


def test_pairs_are_read_as_the_script_for_one_pair_takes_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(version_table, "ROOT", tmp_path)
    monkeypatch.setattr(version_table, "OUTPUT", tmp_path / "output")
    (tmp_path / "output").mkdir()
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "test_pair.sh"
    script.write_text('[ "$1 $2" = "2.7.0 1.6.0" ] && echo "== 2 passed, 1 skipped in 0.10s =="\n')
    assert version_table.run("2.7.0+1.6.0", "not slow") == "4 passed, 2 skipped"
    assert version_table.run("2.10.0+1.9.0", "resume") == "1 not run to the end"
    assert "did not come to an end, see output/2.10.0+1.9.0 resume 0.log" in capsys.readouterr().err

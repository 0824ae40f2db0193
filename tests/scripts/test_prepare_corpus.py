"""The demo's corpus has the bytes of Python's standard library, and is written completely or not at all."""

import mindspore.dataset

from tests.conftest import ROOT


def test_samples_are_consecutive_bytes_of_the_standard_library(run_forked, tmp_path):
    run_forked(ROOT / "scripts" / "demo" / "prepare_corpus.py", "corpus", "--seq_length", "16", "--samples", "50")
    dataset = mindspore.dataset.MindDataset(str(tmp_path / "corpus" / "corpus.mindrecord"), shuffle=False)
    samples = [row["input_ids"] for row in dataset.create_dict_iterator(output_numpy=True, num_epochs=1)]
    assert len(samples) == 50
    assert {(sample.shape, str(sample.dtype)) for sample in samples} == {((17,), "int32")}
    text = b"".join(sample.astype("uint8").tobytes() for sample in samples)
    import __future__

    # The corpus begins with the source of __future__, the first module of the standard library in alphabetical order.
    with open(__future__.__file__, "rb") as source:
        assert text == source.read(len(text))


def test_a_corpus_that_is_there_is_kept(run_forked, tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "mine").write_text("kept")
    printed = run_forked(ROOT / "scripts" / "demo" / "prepare_corpus.py", "corpus").stdout
    assert "used again" in printed
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["mine"]


def test_nothing_is_left_where_writing_fails(run_forked, tmp_path):
    # Let the writing fail by asking for 0 samples: MindRecord refuses to write a file without samples.
    run_forked(ROOT / "scripts" / "demo" / "prepare_corpus.py", "corpus", "--samples", "0", expect_exit=1)
    assert list(tmp_path.iterdir()) == []

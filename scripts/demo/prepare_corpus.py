"""Write a byte-level corpus for the demo: the sources of Python's standard library, as MindRecord.

    python scripts/demo/prepare_corpus.py output/corpus

Every machine with Python has this text. A token is a byte, so the vocabulary has 256 entries. A sample is a row of
``input_ids``: ``--seq_length`` + 1 consecutive bytes as int32.
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path

import numpy as np


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder to make; an existing one is kept unchanged")
    parser.add_argument("--seq_length", type=int, default=128, help="bytes per sample, minus one (default: 128)")
    parser.add_argument("--samples", type=int, default=None, help="number of samples to write (default: all)")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        print(f"Corpus: {arguments.folder} exists already and is used again.")
        return
    samples = cut_into_samples(read_standard_library(), arguments.seq_length + 1)[: arguments.samples]
    write_mindrecord(samples, arguments.folder)
    print(f"Corpus: {len(samples)} samples of {samples.shape[1]} bytes written to {arguments.folder}.")


def read_standard_library():
    """Return the sources of the standard library's top-level modules, joined, as uint8 of shape (bytes,)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def cut_into_samples(text, length):
    """Cut text of shape (bytes,) into int32 samples of shape (samples, length), without a shorter last sample."""
    count = len(text) // length
    return text[: count * length].reshape(count, length).astype(np.int32)


def write_mindrecord(samples, folder):
    """Write the samples to ``folder``, which appears only when all samples are written."""
    from mindspore.mindrecord import FileWriter

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as outer:
        unfinished = Path(outer, folder.name)
        unfinished.mkdir()
        writer = FileWriter(str(unfinished / "corpus.mindrecord"), shard_num=1, overwrite=True)
        writer.add_schema({"input_ids": {"type": "int32", "shape": [samples.shape[1]]}}, "bytes of source code")
        writer.write_raw_data([{"input_ids": sample} for sample in samples])
        writer.commit()
        unfinished.rename(folder)


if __name__ == "__main__":
    main()

"""Scalars and histograms read back from the files that TensorBoard reads."""

import struct


def read_scalars(folder):
    """Return {tag: {step: value}} of the event files in a folder, which are records with a length and two checksums."""
    # Not at the top: MindSpore has to be imported before protobuf is, and chooses how that runs.
    import mindspore  # noqa: F401
    from tensorboardX.proto.event_pb2 import Event

    scalars = {}
    for file in folder.glob("events.*"):
        content, start = file.read_bytes(), 0
        while start < len(content):
            (length,) = struct.unpack_from("<Q", content, start)
            event = Event.FromString(content[start + 12 : start + 12 + length])
            start += length + 16
            for value in event.summary.value:
                found = value.histo if value.HasField("histo") else value.simple_value
                scalars.setdefault(value.tag, {})[event.step] = found
    return scalars

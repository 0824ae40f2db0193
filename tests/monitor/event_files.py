"""Read scalars and histograms from event files of TensorBoard."""

import struct


def read_scalars(folder):
    """Return the scalars in a folder's event files, as {tag: {step: value}}."""
    scalars = {}
    for event in _events(folder):
        for value in event.summary.value:
            content = value.histo if value.HasField("histo") else value.simple_value
            scalars.setdefault(value.tag, {})[event.step] = content
    return scalars


def read_starts(folder):
    """Return the first step of each run in a folder. TensorBoard hides earlier runs' values from this step on."""
    return [event.step for event in _events(folder) if event.HasField("session_log")]


def _events(folder):
    # Import MindSpore before protobuf, because MindSpore sets the environment variable for protobuf's implementation.
    import mindspore  # noqa: F401
    from tensorboardX.proto.event_pb2 import Event

    for file in folder.glob("events.*"):
        content, start = file.read_bytes(), 0
        # An event file is a sequence of events, each with its length and two checksums.
        while start < len(content):
            (length,) = struct.unpack_from("<Q", content, start)
            yield Event.FromString(content[start + 12 : start + 12 + length])
            start += length + 16

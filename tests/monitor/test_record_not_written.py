"""Test that training goes on if ``LossScaleMonitor`` cannot write its record, and that the record goes on later."""

import resource

import pytest
from mindspore.train import LambdaCallback
from test_loss_scale_monitor import OVERFLOWS, Losses, build_again, replay, train, without_loss

from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor
from mindformers_adaptive.record.writer import RunRecord, read_record
from tests.shared.records import missing

pytestmark = pytest.mark.usefixtures("graph_mode")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("/dev/full", "Make room on the disk, or give another 'record_path'."),
        ("file/record.jsonl", "Give another 'record_path'."),
        ("folder", "Give another 'record_path'."),
        # In /sys even root may not create a file.
        ("/sys/record.jsonl", "Allow this user to write there, or give another 'record_path'."),
    ],
)
def test_training_goes_on_without_a_record(tmp_path, messages, name, remedy):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    losses = Losses()
    train(build_again(), [LossScaleMonitor(tmp_path / name), losses], OVERFLOWS[:5])
    assert len(losses.seen) == 5
    [message] = [message for message in messages() if "cannot be written" in message]
    assert f"The record {tmp_path / name} cannot be written: " in message
    assert f" It ends at step 0. {remedy} Training goes on" in message


@pytest.mark.parametrize("name", ["/dev/full", "file/record.jsonl"])
def test_training_stops_without_a_record_if_asked_to(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"The record .*{name} cannot be written: .* 'on_write_error' is 'raise'"):
        train(build_again(), [LossScaleMonitor(tmp_path / name, on_write_error="raise")], OVERFLOWS[:5])


@pytest.fixture
def limit_files():
    """Return a function that limits the size of files, like a full disk. The limit ends with the test."""

    def limit(size=resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    yield limit
    limit()


def test_the_record_goes_on_when_the_disk_has_room_again(path, messages, limit_files):
    def fill_the_disk(run_context):
        """From step 3 to step 5, leave no room on the disk for another line of the run record."""
        step = run_context.original_args().cur_step_num
        if step in (3, 6):
            limit_files(path.stat().st_size + 5 if step == 3 else resource.RLIM_INFINITY)

    filling = LambdaCallback(on_train_step_begin=fill_the_disk)
    train(build_again(), [filling, LossScaleMonitor(path)], OVERFLOWS[:8])
    expected = replay(OVERFLOWS[:8])
    assert without_loss(read_record(path)) == [*expected[:2], missing(3, 5), *expected[5:]]
    assert [message.partition(":")[0] for message in messages() if str(path) in message] == [
        f"Loss scaling is recorded in {path} from step 1.",
        f"The record {path} cannot be written",
        f"The record {path} can be written again, and continues at step 6.",
    ]


def test_record_that_could_not_be_resumed_has_no_step_twice(path, limit_files):
    network = build_again()
    train(network, [LossScaleMonitor(path)], OVERFLOWS[:10])
    record = RunRecord(path)
    record.resume(10)
    record.append([{"step": step, "overflow": True, "loss_scale": 8.0} for step in range(11, 15)])
    record.close()

    def make_room(run_context):
        """Free the disk at step 13, the third step of this training, so that the record can be written again."""
        if run_context.original_args().cur_step_num == 3:
            limit_files()

    full = LambdaCallback(on_train_begin=lambda _: limit_files(50), on_train_step_begin=make_room)
    train(network, [full, LossScaleMonitor(path)], OVERFLOWS[10:20])
    expected = replay(OVERFLOWS[:20])
    assert without_loss(read_record(path)) == [*expected[:10], missing(11, 12), *expected[12:]]

"""The sidecar file with the state of loss scaling is written completely or not at all; a torn file is never used."""

import json

import pytest

from mindformers_adaptive.mindformers.checkpoint_formats import FILE_NAME, read_sidecar, write_sidecar

STATE = {"scale_window": 200, "window_index": 5}


def test_floats_and_lists_are_kept_bit_for_bit_in_strict_json(tmp_path):
    state = {**STATE, "level": 17.46875, "overflow_rate": [0.5, 0.1, 1 / 3], "largest_gradient": float("inf")}
    write_sidecar(tmp_path, 2.0**17, state)
    json.loads((tmp_path / FILE_NAME).read_text(), parse_constant=pytest.fail)
    assert read_sidecar(tmp_path) == (2.0**17, state)
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]


def test_an_earlier_file_stays_when_writing_fails(tmp_path):
    write_sidecar(tmp_path, 2.0**17, STATE)
    with pytest.raises(TypeError):
        write_sidecar(tmp_path, 2.0**18, {"scale_window": object()})
    assert read_sidecar(tmp_path) == (2.0**17, STATE)


def test_every_torn_file_is_refused(tmp_path):
    write_sidecar(tmp_path, 2.0**17, STATE)
    whole = (tmp_path / FILE_NAME).read_text()
    for length in range(len(whole.rstrip())):
        (tmp_path / FILE_NAME).write_text(whole[:length])
        with pytest.raises(ValueError, match=rf"{FILE_NAME} cannot be used: "):
            read_sidecar(tmp_path)


WHOLE = {"format": 1, "loss_scale": 1.0, "state": {}}
OTHER = [
    (WHOLE | {"format": 2}, "'format' in the file must be 1, but is 2.* the version .* that wrote"),
    (WHOLE | {"state": {"scale_window": "20"}}, r"value '20' - at `\$.state.* another step"),
    (WHOLE | {"state": {"bound": True}}, r"got `bool` - at `\$.state"),
    (WHOLE | {"state": [1]}, r"got `array` - at `\$.state"),
    (WHOLE | {"loss_scale": "many"}, r"value 'many' - at `\$.loss_scale"),
    (WHOLE | {"loss_scale": [1]}, r"got `array` - at `\$.loss_scale"),
    *(
        ({key: WHOLE[key] for key in WHOLE if key != left_out}, f"missing required field `{left_out}`")
        for left_out in WHOLE
    ),
    ([], "got `array`"),
]


@pytest.mark.parametrize(("content", "message"), OTHER)
def test_other_content_is_refused_with_the_reason(tmp_path, content, message):
    (tmp_path / FILE_NAME).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{FILE_NAME} cannot be used: .*{message}"):
        read_sidecar(tmp_path)

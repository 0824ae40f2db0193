"""Plots never leave half-written files, import matplotlib late and without global state, and fit their titles."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_adaptive.plots.canvas import as_text, gather, headline, new_figure, one_per_column, percent, save
from tests.plots.drawn import title

VALUES = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=300)
ROW = {"step": 1, "overflow": False, "loss_scale": 2.0, "next_loss_scale": 2.0}
DRAW = (
    "import sys; from mindformers_adaptive.plots import canvas, runs; "
    f"canvas.save(runs.draw_runs({{'': [{ROW}]}}), 'a.png')"
)


def test_png_is_1200_pixels_wide(tmp_path):
    written = save(new_figure(10, 3), tmp_path / "new" / "a.PNG").read_bytes()
    assert written.startswith(b"\x89PNG")
    assert (int.from_bytes(written[16:20], "big"), int.from_bytes(written[20:24], "big")) == (1200, 360)


def test_svg_has_the_same_bytes_each_time(tmp_path):
    written = []
    for name in ("a.svg", "b.svg"):
        figure = new_figure(4, 3)
        figure.subplots().plot([1, 2], [1, 2])
        written.append(save(figure, tmp_path / name).read_bytes())
    assert written[0] == written[1]
    assert b"<svg" in written[0]


@pytest.mark.parametrize("name", ["picture", "picture.jpg", "picture.png.txt"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=rf"'path' must name .* \.png or \.svg, but got .*/{name}'"):
        save(new_figure(2, 2), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_picture_that_cannot_be_drawn_leaves_the_old_file(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(b"old")
    figure = new_figure(2, 2)
    figure.text(0, 0, r"$\nonsense{$")
    with pytest.raises(ValueError, match="nonsense"):
        save(figure, file)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.png", b"old")]


@pytest.mark.parametrize("words", [5, 40])
def test_long_finding_stays_within_the_picture(words):
    figure = new_figure(10, 3)
    finding = " ".join(["of $2^{16}$ wide words"] * words)
    headline(figure, finding)
    figure.canvas.draw()
    assert figure._suptitle.get_window_extent().x1 < 1200
    assert title(figure) == finding


def test_dollar_signs_in_a_name_make_no_formula(tmp_path):
    name = "run $x$ of $\\nonsense{$"
    escaped, plain = new_figure(4, 2), new_figure(4, 2)
    headline(escaped, as_text(name))
    headline(plain, name)
    with pytest.raises(ValueError, match="nonsense"):
        save(plain, tmp_path / "plain.png")
    plain._suptitle.set(parse_math=False, wrap=False)
    drawn = [save(figure, tmp_path / "a.png").read_bytes() for figure in (escaped, plain)]
    assert drawn[0] == drawn[1]


def test_percent_has_two_digits():
    shares = [None, 0.0, 1e-9, 0.00123, 0.0303, 0.0345, 0.1, 0.985, 0.9999, 1.0]
    shown = "not known", "0 %", "0.0000001 %", "0.12 %", "3 %", "3.5 %", "10 %", "98 %", "over 99 %", "100 %"
    assert tuple(map(percent, shares)) == shown


def test_drawing_leaves_global_state_alone(run_python):
    printed = run_python("-c", f"{DRAW}; print([name in sys.modules for name in ('matplotlib', 'matplotlib.pyplot')])")
    assert printed.stdout == "[True, False]\n"


def test_missing_matplotlib_is_told_with_the_extra(run_python):
    code = f"import sys; sys.modules['matplotlib'] = None; {DRAW}"
    message = run_python("-c", code, expect_exit=1).stderr.splitlines()[-1]
    assert message.startswith("ImportError: Pictures need matplotlib")
    assert all(part in message for part in ("(No module named 'matplotlib.", "the extra 'plot': pip install '.[plot]'"))


@given(st.sets(st.integers(0, 10**6), max_size=200), st.integers(1, 30))
def test_every_mark_has_one_near_it_that_is_drawn(places, columns):
    x = np.array(sorted(places), float)
    thinned_x = one_per_column(x, columns)
    assert (np.diff(thinned_x) > 0).all()
    assert set(thinned_x) <= places
    if len(x) <= columns:
        assert len(thinned_x) == len(x)
        return
    assert len(thinned_x) <= columns + 1
    width = (x[-1] - x[0]) / columns
    assert all(np.abs(thinned_x - value).min() <= width for value in x)


@given(VALUES, st.data())
def test_blocks_have_the_extremes_and_medians_of_their_points(values, data):
    blocks = data.draw(st.integers(1, len(values)))
    gathered = gather(np.arange(len(values)) * 2.0, values, blocks)
    start, sizes = 0, []
    for middle, *extremes in zip(*gathered, strict=True):
        # The x value of a point is twice its index, so the middle of a block of points is its first index plus its last
        # index. ``end`` is the index after the last.
        end = round(middle) - start + 1
        block = [value for value in values[start:end] if math.isfinite(value)] or [math.nan]
        np.testing.assert_array_equal(extremes, (min(block), np.median(block), max(block)))
        sizes.append(end - start)
        start = end
    assert start == len(values)
    assert len(sizes) == blocks
    assert max(sizes) - min(sizes) <= 1

"""The picture of work and memory on a time axis."""

import pytest

from course_utils.lessons.shared.time_axis import Work, time_axis

WORK = {
    "compute": [("forward", 0, 3, "activations"), Work("backward", 3, 9)],
    "communication": [("bucket", 6, 9.5, "#D55E00")],
}
MEMORY = {"parameters": [4 * 10**9] * 3, "gradients": [0, 10**9, 2 * 10**9]}


def test_it_tells_work_and_the_peak_to_those_who_do_not_see_it() -> None:
    figure = time_axis(WORK, MEMORY, [0, 3, 9], "Gradients stay")
    assert "compute, 2 boxes: forward, backward; communication, 1 box: bucket." in figure.alt
    assert "peak of 6.00 GB: parameters at most 4.00 GB; gradients at most 2.00 GB" in figure.alt
    assert figure.rows[1] == ["9", "4.00 GB", "2.00 GB", "6.00 GB"]


def test_rows_alone_need_no_memory() -> None:
    figure = time_axis(WORK, {}, [], "No memory is drawn")
    assert len(figure.axes) == 1
    assert not figure.rows


def test_each_kind_has_a_size_for_each_time() -> None:
    with pytest.raises(ValueError, match="gradients has 3 sizes for 2 times"):
        time_axis(WORK, {"gradients": [1, 2, 3]}, [0, 1], "Too few times")

"""Stacks of pictures."""

import numpy as np
import pytest

from sf_torchrl.envs.frames import FrameStack
from sf_torchrl.envs.spaces import EnvError


def plain(value, height=3, width=5, channels=3):
    return np.full((height, width, channels), value, np.uint8)


@pytest.mark.parametrize("order", ["first", "last"])
def test_the_newest_picture_is_last_and_the_oldest_goes(order):
    stack = FrameStack(3, 5, 3, 2, order)
    axes = (1, 2) if order == "first" else (0, 1)
    shape = (6, 3, 5) if order == "first" else (3, 5, 6)
    assert stack.shape == shape
    seen = [stack.reset(plain(1)), stack.add(plain(2)), stack.add(plain(3)), stack.reset(plain(4))]
    assert [picture.shape for picture in seen] == [shape] * 4
    assert [picture.mean(axes).tolist() for picture in seen] == [
        [1] * 6,
        [1] * 3 + [2] * 3,
        [2] * 3 + [3] * 3,
        [4] * 6,
    ]


@pytest.mark.parametrize("order", ["first", "last"])
def test_channels_height_and_width_stay_where_they_belong(order):
    picture = np.random.default_rng(0).integers(0, 256, (3, 5, 3), np.uint8)
    found = FrameStack(3, 5, 3, 1, order).reset(picture)
    assert np.array_equal(found, picture.transpose(2, 0, 1) if order == "first" else picture)


def test_a_grey_picture_needs_no_dimension_for_its_channel():
    stack = FrameStack(3, 5, 1, 4, "first")
    assert stack.reset(plain(7)[..., 0]).shape == (4, 3, 5)


def test_what_was_returned_is_not_written_again():
    stack = FrameStack(3, 5, 3, 2, "first")
    first = stack.reset(plain(1))
    stack.add(plain(2))
    assert (first == 1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5, 3, 1, "first"), "height=0 must be at least 1"),
        ((3, 5, 3, 0, "first"), "frame_stack=0 must be at least 1"),
        ((3, 5, 3, 1, "middle"), "channel_order='middle' must be first or last"),
    ],
)
def test_sizes_and_orders_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(EnvError, match=message):
        FrameStack(*arguments)

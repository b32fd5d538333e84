"""A table of bars says which are met."""

import pytest

from benchmarks.bars import Bar


@pytest.mark.parametrize(
    ("measured", "most", "met"),
    [
        ((2.0,), False, True),
        ((2.0, 1.9), False, False),
        ((2.0,), True, True),
        ((2.1,), True, False),
    ],
)
def test_a_bar_is_met_by_every_number(measured, most, met):
    assert Bar("it", 2.0, measured, most=most).met is met

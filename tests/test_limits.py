"""A test that would run for ever fails where it is."""

import signal

import pytest
from conftest import SECONDS, SLOW_SECONDS, time_limit


def test_a_test_that_takes_too_long_fails_where_it_is():
    with pytest.raises(pytest.fail.Exception, match=r"longer than its limit of 0\.1 seconds"), time_limit(0.1):
        wait_for_ever()


def wait_for_ever():
    while True:
        pass


def test_every_test_has_a_limit():
    assert SECONDS - 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= SECONDS


@pytest.mark.slow
def test_a_slow_test_has_a_higher_one():
    assert SLOW_SECONDS - 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= SLOW_SECONDS

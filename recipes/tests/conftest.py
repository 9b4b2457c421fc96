"""The fixtures of all tests. They are in `desk.py`, which the tests of the recipes also use."""

from desk import *  # noqa: F403
from desk import pytest_sessionfinish, pytest_unconfigure  # noqa: F401

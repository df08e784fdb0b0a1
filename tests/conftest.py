"""Fixtures for all tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ranks_fixture import Ranks

# How long an example takes says nothing on a machine that does other things too.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(4).run(function, *args)`: call a function of the test's module on 4 ranks, get the list of results."""
    pools = Ranks()
    yield pools
    pools.close()

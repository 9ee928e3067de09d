"""`pools(4)` is the pool of four processes that all distributed tests share; each starts when first asked for."""

import sys
from pathlib import Path

import pytest

# Tests, and the processes that they start, import pool.py and sharding.py by name.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def pool_type():
    """The class, for tests that need a pool of their own: those that break it."""
    from pool import Pool

    return Pool


_made = {}
"""World size → its pool."""


@pytest.fixture(scope="session")
def pools(pool_type):
    """A function from a world size to its pool."""
    return lambda size: _made.get(size) or _made.setdefault(size, pool_type(size))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """After the last test of this folder, close the pools, whose threads take time also where they are idle."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        while _made:
            _made.popitem()[1].close()

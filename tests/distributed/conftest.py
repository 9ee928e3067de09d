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


@pytest.fixture(scope="session")
def pools(pool_type):
    """A function from a world size to its pool."""
    made = {}

    def of(size):
        if size not in made:
            made[size] = pool_type(size)
        return made[size]

    yield of
    for pool in made.values():
        pool.close()

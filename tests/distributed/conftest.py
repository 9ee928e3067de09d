"""`pools(4)` is the pool of four processes that all distributed tests share; each starts when first asked for."""

import importlib
import sys
from pathlib import Path

import pytest


def _pool_module():
    """pool.py as a module that the forked processes find too: they import it by name to begin."""
    folder = str(Path(__file__).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("pool")


@pytest.fixture(scope="session")
def pool_type():
    """The class, for tests that need a pool of their own: those that break it."""
    return _pool_module().Pool


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

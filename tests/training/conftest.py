"""What the tests of training/ share."""

import pytest


@pytest.fixture(autouse=True)
def known_peak(monkeypatch):
    """No test measures the matmul peak of this machine, which takes longer than most runs here; see test_peak.py."""
    monkeypatch.setattr("multipack.training.precision.matmul_peak", lambda *_: 1e11)

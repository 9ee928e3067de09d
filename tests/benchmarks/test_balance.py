"""benchmarks/balance.py: the method that ours is compared with, and the stored figures."""

import numpy as np


def test_karmarkar_karp_divides_as_published(script):
    method = script("balance").karmarkar_karp
    weights = np.array([8, 7, 6, 5, 4])
    assert sorted(int(weights[part].sum()) for part in method(weights, 2)) == [14, 16]
    assert [] in method(np.array([3, 3, 0, 0]), 4)


def test_stored_figures_are_those_asked_for(figures):
    saved = figures("balance")
    asked = [each for table in saved["tables"] for each in table["asked"]]
    assert not saved["quick"]
    assert len(asked) == 3
    assert all(each["reached"] <= each["asked"] for each in asked)

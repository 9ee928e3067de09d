"""What no arrangement of given documents can beat: a proven ceiling for cost utilization.

    documents of a step        cost   |########| |###| |##| |#| |#|
    packs, evenly by cost             |####|   |####|   |####|       what balance would like
    packs that can be                 |########| |###·| |###·|       a document is not cut

The longest documents of a step decide how far its packs can agree. The ceiling is for the arrangement of the
documents that a step has; which documents it has is the plan's choice, and another choice has another ceiling.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import bounds
from multipack.planning.options import Sync

Integers = NDArray[np.int64]


def least_step_cost(
    lengths: Integers, costs: Integers, world: int, micro_batches: int, capacity: int, sync: Sync
) -> int:
    """A proven lower bound on the sum over a step's meetings of the dearest rank's cost.

    Once a step (`step`): a rank is a pack of micro_batches · capacity tokens; `bounds.dearest_bound` says what the
    dearest costs at least.

    At each micro-batch (`micro`, `pipeline`): let p₁ ≥ p₂ ≥ … be the packs' costs, and W the ranks. Put the
    meetings in falling order of their dearest packs. Before the one that comes j-th, counted from 0, there are
    j · W packs, so its dearest pack costs p_{jW+1} at least. The first j meetings cost no more than A_j, the most
    that j · W packs can hold, and no more than W times the sum of their dearest packs; each of the others
    takes at least the mean of its packs. So for every j = 1 … micro_batches the sum is at least

        B_j + max(total − min(A_j, W · B_j), 0) / W,     B_j = p₁ + p_{W+1} + … + p_{(j−1)W+1},

    which does not fall with B_j, so that a bound may stand for each p.

    Args:
        lengths: (documents,) tokens of the step's documents, in any order, none above the capacity.
        costs: (documents,) int64, rising with length.
        world: ranks.
        micro_batches: packs of each rank.
        capacity: most tokens of a pack.
        sync: where ranks meet.
    """
    order = np.lexsort((-costs, -lengths))
    lengths, costs = lengths[order], costs[order]
    if sync == "step":
        return bounds.dearest_bound(lengths, costs, world, micro_batches * capacity)
    packs, total = world * micro_batches, int(costs.sum())
    best, dearest = 0, 0
    for meeting in range(micro_batches):
        before = meeting * world
        bound = bounds.dearest_bound(lengths, costs, packs, capacity, before)
        outside = bounds.first_outside(lengths, before, capacity)
        dearest += max(bound, int(costs[outside])) if outside < len(costs) else bound
        most = min(bounds.most_cost(lengths, costs, before + world, capacity), world * dearest)
        best = max(best, dearest - (most - total) // world if most < total else dearest)
    return best


def kappa(lengths: Integers, costs: Integers) -> float:
    """κ: the cost of a token of the longest document over the mean cost of a token.

    For cost(l) = L*·l + l(l+1) that is (L* + Lmax) / (L* + Σl²/Σl), but for the 1 of l + 1. Where every step has
    such a document and packs are full, no arrangement has a higher cost utilization than 1 / κ; packs
    of κ · Lmax tokens in the mean let the others catch up with it.
    """
    longest = int(np.argmax(lengths))
    return int(costs[longest]) / int(lengths[longest]) / (int(costs.sum()) / int(lengths.sum()))

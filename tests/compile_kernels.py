"""Every compiled kernel, called once: numba then has them on disk for all processes of tests (`make kernels`)."""

import numpy as np

from multipack.data.views.common_prefix import common_prefixes, cut, least_slots, sort_by_tokens
from multipack.planning.cost import CostModel
from multipack.planning.packing import pack
from multipack.planning.placement import place
from multipack.planning.plan import plan

LENGTHS = np.array([3, 5, 2, 4, 6, 1])

for balance in ("cost", "joint", "tokens"):
    plan(LENGTHS, capacity=8, packs_per_step=2, window=2, balance=balance).deal(0, 2)
for method in ("next_fit", "first_fit_decreasing", "best_fit", "fewest"):
    pack(LENGTHS, 8, method, max_documents=3)
place([9, 3, 2], CostModel.from_shape(), 2, 8)
for dtype in (np.uint16, np.uint32):
    tokens, starts = np.arange(LENGTHS.sum()).astype(dtype), LENGTHS.cumsum() - LENGTHS
    order = sort_by_tokens(tokens, starts, LENGTHS)
    common = common_prefixes(tokens, starts, LENGTHS, order)
cut(LENGTHS[order], common, 8)
least_slots(LENGTHS[order], common, 8)

"""Plans whose steps have a document in every pack, for training frameworks that cannot run an empty batch.

    order   a b c d e f g h i j …
    step 0  |ad|be|cg|                   `packs_per_step` packs, equal in cost, at most `capacity` tokens each
    step 1  |fj|hk|i·|                   the same number in every step; leftover documents are in `plan.dropped`

A plan leaves packs of a step empty if the step has few, long documents. A rank without a batch would block the others,
so such a step takes documents from other steps: a document always fits into an empty pack.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from multipack.planning.options import PlanOptions
from multipack.planning.packing import pack
from multipack.planning.plan import Plan, plan

Integers = NDArray[np.int64]


def full_steps(
    lengths: Integers,
    options: PlanOptions,
    *,
    drop_last: bool = False,
    steps: int | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> Plan:
    """Plan an epoch with at least one document in every pack.

    Args:
        lengths: (documents,) number of tokens of each document.
        options: options of the plan; `tail` is set here.
        drop_last: leave out the last documents if their packs do not fill a step.
        steps: number of steps; documents that do not fit are left out. None = the fewest that hold all documents.
        seed: seed of the order.
        epoch: epoch of the order.

    Returns:
        The plan. A step has fewer documents than packs only if there are too few documents for all steps.
    """

    def planned(number: int | None, tail: Literal["keep", "drop"]) -> Plan:
        return plan(lengths, options=replace(options, tail=tail), steps=number, seed=seed, epoch=epoch)

    packs = options.packs_per_step
    fewest = len(pack(lengths, options.capacity, max_documents=options.max_documents or None))
    if steps is None and drop_last and fewest % packs:
        steps = max(1, fewest // packs)
    if steps is not None and steps * packs < fewest:
        return _without_empty_packs(planned(steps, "drop"))
    made = planned(None, "keep")
    if steps is None:
        # Other orders of the same documents need the same number of steps, and no step may lack documents.
        steps = min(max(made.num_steps, -(-fewest // packs)), -(-len(lengths) // packs))
        if steps * packs > len(lengths) and len(lengths) // packs * packs >= fewest:
            steps = len(lengths) // packs
    return _without_empty_packs(made if steps == made.num_steps else planned(steps, "keep"))


def _without_empty_packs(made: Plan) -> Plan:
    """Move documents, each as a new pack, into steps with fewer documents than packs.

    A step takes documents that were dropped, then the shortest ones of the nearest step with more documents than
    packs, or of the last step if there is none.
    """
    packs, last = made.packs_per_step, made.num_steps - 1
    counts = np.diff(made.pack_offsets[made.step_offsets])
    lacking = np.flatnonzero(counts < packs)
    if len(lacking) == 0:
        return made
    order = np.concatenate([made.order, made.dropped])
    # The dropped documents are held as one pack of one more step.
    counts = np.append(counts, len(made.dropped))
    step_of = np.repeat(np.arange(last + 2), counts)
    sizes = np.append(np.diff(made.pack_offsets), len(made.dropped))
    pack_of = np.repeat(np.arange(len(sizes)), sizes)
    for step in lacking.tolist():
        while counts[step] < packs:
            spare = np.flatnonzero(counts[:-1] > packs)
            giver = (
                last + 1 if counts[-1] else int(spare[np.abs(spare - step).argmin()]) if len(spare) else last
            )
            if giver == step or (giver == last and counts[last] == 1):
                break
            held = np.flatnonzero(step_of == giver)
            moved = held[0] if giver > last else held[np.argmin(made.lengths[order[held]])]
            step_of[moved], pack_of[moved] = step, pack_of.max() + 1
            counts[giver] -= 1
            counts[step] += 1
    by_step = np.lexsort((pack_of, step_of))
    kept = by_step[step_of[by_step] <= last]
    starts = np.flatnonzero(np.diff(pack_of[kept], prepend=-1))
    return replace(
        made,
        order=order[kept],
        pack_offsets=np.append(starts, len(kept)),
        step_offsets=np.searchsorted(step_of[kept][starts], np.arange(last + 2)),
        dropped=order[by_step[len(kept) :]],
    )

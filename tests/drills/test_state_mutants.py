"""Mutants of every saved state of the planner and the samplers: refused in one line, or another legal state.

A mutant changes types, numbers, keys and nesting at random places. It never ends in anything else than a ValueError,
nor takes long or much memory.
"""

import json
import random
import resource
import time

import numpy as np
import pytest
import torch
from mutation import of_tree
from torch.utils.data import RandomSampler

from multipack.data.packs.sampler import PackedBatchSampler
from multipack.integrations.axolotl import MultipackBatchSampler
from multipack.integrations.multipack_v2 import MultipackDistributedBatchSampler
from multipack.planning.stream import PackStream

MUTANTS = 2000
LENGTHS = np.random.default_rng(3).integers(1, 60, 60)


def sampler(**options):
    return PackedBatchSampler(
        LENGTHS, capacity=128, packs_per_step=4, rank=1, world_size=2, seed=3, **options
    )


class Stored:
    """A source with a state of its own."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < len(LENGTHS):
            self.next += 1
            yield {"length": int(LENGTHS[self.next - 1])}

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def stream():
    return PackStream(Stored(), capacity=128, packs_per_step=2, window=2, length=lambda item: item["length"])


def axolotl():
    order = RandomSampler(LENGTHS, generator=torch.Generator().manual_seed(1))
    return MultipackBatchSampler(order, 2, 128, LENGTHS)


MAKERS = {
    "sampler, keep": sampler,
    "sampler, carry": lambda: sampler(tail="carry"),
    "stream": stream,
    "multipack_v2": lambda: MultipackDistributedBatchSampler(128, LENGTHS, 2, 1),
    "axolotl": axolotl,
}


def taken(made, count=None):
    """Documents of the next batches."""
    batches = []
    for batch in made:
        batches.append(
            batch.positions.tolist()
            if hasattr(batch, "positions")
            else np.array(batch, dtype=object).tolist()
        )
        if len(batches) == count:
            break
    return batches


def outcomes(make, state, expected, draw):
    """What loading a mutant, and going on from it, ended in."""
    given = of_tree(state, draw)
    made, started = make(), time.monotonic()
    try:
        made.load_state_dict(given)
        after = taken(made)
    except ValueError as error:
        return "refused" if "\n" not in str(error) else "several lines"
    except KeyError as error:  # the source's own state
        return "refused" if make is stream and "next" in str(error) else f"KeyError {error}"
    except Exception as error:
        return f"{type(error).__name__} {error} of {given}"[:300]
    if time.monotonic() - started > 10:
        return "slow"
    return "same" if after == expected else "forged"


@pytest.mark.parametrize("name", MAKERS)
def test_mutants_of_states(name, outcome):
    make, draw, counts = MAKERS[name], random.Random(name), {}
    begun = make()
    iterator = iter(begun)
    for _ in range(3):
        next(iterator)
    state = begun.state_dict()
    if name != "axolotl":
        state = json.loads(json.dumps(state))
    whole = make()
    whole.load_state_dict(state)
    expected = taken(whole)
    assert expected
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(MUTANTS):
        ended = outcomes(make, state, expected, draw)
        counts[ended] = counts.get(ended, 0) + 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    legal = ("refused", "same", "forged")
    wrong = {ended: count for ended, count in counts.items() if ended not in legal}
    outcome("mutants", MUTANTS)
    for ended in legal:
        outcome(ended, counts.get(ended, 0))
    outcome("wrong", sum(wrong.values()))
    assert wrong == {}
    assert grown < 1 << 20  # KiB

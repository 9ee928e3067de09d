"""Full steps in orders where windows alone would leave a pack empty; test_axolotl and test_multipack_v2 draw others."""

import numpy as np

from multipack.integrations.host_sampler import full_steps
from multipack.planning.options import PlanOptions


def packs_of(made):
    """The non-empty packs of each step, as dealt to one rank each."""
    return [
        [documents for documents in made.deal(step, made.packs_per_step) if len(documents)]
        for step in range(made.num_steps)
    ]


def test_no_step_is_made_that_would_lack_documents():
    """401 documents fit into 400 packs, but only if the two short ones, far apart in order, share one."""
    lengths = np.full(401, 60)
    lengths[[0, 300]] = 45
    plan = full_steps(lengths, PlanOptions(capacity=100, packs_per_step=8, window=1, order="given"))
    assert (plan.num_steps, plan.num_documents) == (50, 401)
    assert all(len(step) == 8 for step in packs_of(plan))


def test_dropped_documents_fill_empty_packs_first():
    """One document per pack: a long one takes the tokens of a step, but two ranks need two documents."""
    options = PlanOptions(capacity=4, packs_per_step=2, window=1, order="given", max_documents=1)
    plan = full_steps(np.array([1, 4, 1, 1, 1]), options, drop_last=True)
    assert [len(step) for step in packs_of(plan)] == [2, 2]
    assert plan.num_documents + plan.dropped.size == 5

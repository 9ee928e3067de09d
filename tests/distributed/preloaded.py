"""What processes of pools have in common: imported and done once by the server that forks them (pool.py)."""

import os
from contextlib import suppress

import numpy as np

import multipack.models.decoder
import multipack.parallel.build
import multipack.parallel.pipeline
import multipack.training.train  # noqa: F401
from multipack.planning.cost import CostModel
from multipack.planning.placement import place
from multipack.planning.plan import plan

with suppress(ImportError):  # its trainer takes each rank of tests of hosts as long as torch
    import accelerate  # noqa: F401
    from transformers import Trainer  # noqa: F401

os.fsync = lambda descriptor: None  # as in the processes of tests: nothing waits for the disk

# numba reads its compiled kernels from disk at their first call, and imports a good part of scipy.
plan(np.array([3, 5, 2, 4, 6, 1]), capacity=8, packs_per_step=2).deal(0, 2)
place([9, 3, 2], CostModel.from_shape(), 2, 8)

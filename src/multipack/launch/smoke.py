"""Check that processes can train together: every collective, and one training step.

`multipack doctor` starts this module under torchrun. Rank 0 prints one line of JSON per finished check, so that the
first missing one is the check that failed or hung.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

CHECKS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"),
    "training step",
)
"""In the order in which they run."""
COLLECTIVE_SECONDS = 10.0
"""Timeout of a collective."""

if TYPE_CHECKING:
    from multipack.parallel.world import World


def training_step(world: World) -> bool:
    """Return whether a step of all ranks equals the step of one process with all packs, to 4 digits."""
    import numpy as np
    import torch

    from multipack.data.collate import PackedCollator
    from multipack.data.documents import Document
    from multipack.models.decoder import Decoder
    from multipack.parallel.build import plain_engine
    from multipack.parallel.mesh import Mesh, build_mesh
    from multipack.parallel.parallel_config import ParallelConfig
    from multipack.parallel.world import World
    from multipack.shapes import ModelShape

    def pack(seed: int) -> Any:
        draw = np.random.default_rng(seed)
        tokens = [draw.integers(0, 50, length).astype(np.uint16) for length in draw.integers(4, 20, 3)]
        documents = [Document(each, np.array([[0, len(each)]])) for each in tokens]
        return PackedCollator(max_documents=3, max_seqlen=64)(documents)

    packs = [pack(seed) for seed in range(world.size)]
    targets = float(sum(batch.num_target_tokens for batch in packs))

    def step(mesh: Mesh, batches: list[Any]) -> torch.Tensor:
        torch.manual_seed(0)
        shape = ModelShape(layers=2, heads=2, d_model=32, d_ff=64, vocabulary_size=50)
        model = Decoder(shape).to(world.device)
        engine = plain_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh)
        engine.forward_backward(batches, targets)
        norm = engine.clip(0)
        engine.step(0.1)
        return torch.tensor([norm, float(next(model.parameters()).detach().abs().sum())])

    together = step(build_mesh(ParallelConfig(), world), [packs[world.rank]])
    alone = step(Mesh.plain(World(device=world.device)), packs)
    return torch.allclose(together, alone, rtol=1e-4)


def main(device: Any) -> None:
    """Run all checks until one fails; rank 0 prints the results."""
    from multipack.launch.bandwidth import OPERATIONS, measure
    from multipack.parallel.world import connected

    with connected(device, COLLECTIVE_SECONDS) as world:
        for name in CHECKS:
            began = time.monotonic()
            if name in OPERATIONS:
                wrong = list(measure(world, name, 4096, repeats=1).wrong_ranks)
            else:
                correct = world.gather(str(training_step(world)))
                wrong = [rank for rank, text in enumerate(correct) if text != "True"]
            error = f"wrong result on rank {', '.join(map(str, wrong))}" if wrong else ""
            if world.is_main:
                found = {"check": name, "error": error, "seconds": time.monotonic() - began}
                print(json.dumps(found), flush=True)
            if error:
                sys.exit(1)  # no barrier: torchrun ends the other process


if __name__ == "__main__":
    main(sys.argv[1])

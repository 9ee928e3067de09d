"""What two processes do to show that processes can work together here: every collective, and a step of training.

Started by `multipack doctor` under torchrun. Each process writes a line for each check into a file of its own as soon
as the check is done, so that what hangs afterwards leaves what was learned before.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from multipack.parallel.world import World

CHECKS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"),
    *("send and receive", "barrier", "training step"),
)
"""In the order in which they run."""

COLLECTIVE_SECONDS = 10.0
"""How long a process waits for the other in a collective."""


def _collective(name: str, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, what it must be) of one collective; rank r holds 1, 2, … multiplied by r + 1."""
    import torch

    from multipack.parallel import collectives

    rank, size = world.rank, world.size
    held = [torch.arange(1.0, 2 * size + 1, device=world.device) * (other + 1) for other in range(size)]
    own, empty = held[rank], torch.empty(0, device=world.device)
    mine = slice(2 * rank, 2 * rank + 2)
    total, joined = torch.stack(held).sum(0), torch.cat(held)
    expected = {
        "all_reduce": total,
        "reduce": total if rank == 0 else empty,
        "broadcast": held[0],
        "all_gather": joined,
        "reduce_scatter": total[mine],
        "gather": joined if rank == 0 else empty,
        "scatter": held[0][mine],
        "all_to_all": torch.cat([other[mine] for other in held]),
    }
    return getattr(collectives, name)(own), expected[name]


def _pass_on(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Each process sends its number to the next one, and receives that of the one before."""
    import torch
    import torch.distributed as dist

    number = torch.full((3,), float(world.rank), device=world.device)
    received = torch.empty_like(number)
    before, behind = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    pair = [dist.P2POp(dist.isend, number, behind), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return received, torch.full_like(number, float(before))


def _train(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient norm and a weight after a step of both processes, the same of one process with both packs)."""
    import numpy as np
    import torch

    from multipack.data.collate import PackedCollator
    from multipack.data.documents import Document
    from multipack.models.decoder import Decoder
    from multipack.parallel.build import plain_engine
    from multipack.parallel.mesh import Mesh, build_mesh
    from multipack.parallel.parallel_config import ParallelConfig
    from multipack.parallel.world import World
    from multipack.shapes import SHAPES

    def pack(seed: int) -> Any:
        draw = np.random.default_rng(seed)
        lengths = draw.integers(4, 20, 3)
        documents = [
            Document(draw.integers(0, 50, length).astype(np.uint16), np.array([[0, length]]))
            for length in lengths
        ]
        return PackedCollator(max_documents=3, max_seqlen=64)(documents)

    packs = [pack(seed) for seed in range(world.size)]
    targets = float(sum(batch.num_target_tokens for batch in packs))

    def step(over: Mesh, batches: list[Any]) -> torch.Tensor:
        torch.manual_seed(0)
        model = Decoder(SHAPES["tiny"].with_vocabulary(50)).to(world.device)
        engine = plain_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), over)
        engine.forward_backward(batches, targets)
        norm = engine.clip(0)
        engine.step(0.1)
        return torch.tensor([norm, float(next(model.parameters()).detach().abs().sum())])

    both = build_mesh(ParallelConfig(), world)
    return step(both, [packs[world.rank]]), step(Mesh.plain(World(device=world.device)), packs)


def _check(name: str, world: World) -> str:
    """What is wrong with a check's result; empty = nothing."""
    import torch

    if name == "barrier":
        world.barrier()
        return ""
    one: dict[str, Callable[[World], tuple[torch.Tensor, torch.Tensor]]] = {
        "send and receive": _pass_on,
        "training step": _train,
    }
    result, expected = one[name](world) if name in one else _collective(name, world)
    if result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-4):
        return ""
    return f"rank {world.rank} got {result.tolist()}, not {expected.tolist()}"


def main(folder: Path, device: Any) -> None:
    """Run all checks until one fails, and write what they found to `folder`/rank-R.jsonl."""
    from multipack.parallel.world import connected

    with (
        connected(device, COLLECTIVE_SECONDS) as world,
        (folder / f"rank-{world.rank}.jsonl").open("w") as file,
    ):
        for name in CHECKS:
            began = time.monotonic()
            try:
                error = _check(name, world)
            except Exception as raised:  # whatever it is, it is what the doctor was asked for
                error = f"{type(raised).__name__}: {raised}"
            found = {"check": name, "error": error, "seconds": time.monotonic() - began}
            print(json.dumps(found), file=file, flush=True)
            if error:
                sys.exit(1)  # the other process may wait in a collective: no barrier, torchrun ends it


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

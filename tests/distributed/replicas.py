"""Run by torchrun from test_train.py: counts DDP's reductions and compares replicas' hashes."""

import gc
import json
import sys
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.models.decoder import Decoder
from multipack.parallel.base import state_hash
from multipack.parallel.config import ParallelConfig
from multipack.parallel.engine import plain_engine
from multipack.parallel.mesh import build_mesh
from multipack.parallel.world import connected
from multipack.shapes import SHAPES
from multipack.training.optimizer import OptimizerConfig, build_optimizer


def batch(seed, length):
    import numpy as np

    tokens = np.random.default_rng(seed).integers(0, 50, length).astype(np.uint16)
    document = Document(tokens, np.array([[0, length]]))
    return PackedCollator(max_documents=1, max_seqlen=64)([document])


def main():
    with connected("cpu", timeout_seconds=20) as world:
        torch.manual_seed(100 + world.rank)  # replicas start apart on purpose
        model = Decoder(SHAPES["tiny"].with_vocabulary(50))
        own = state_hash({"model": dict(model.named_parameters())})
        optimizer = build_optimizer(model, OptimizerConfig())
        engine = plain_engine(model, optimizer, build_mesh(ParallelConfig(), world))
        buckets = []

        def counting(state, bucket):
            buckets.append(bucket.index())
            return allreduce_hook(state, bucket)

        engine._call.register_comm_hook(None, counting)
        hashes = [engine.check_replicas()]
        for step in range(3):
            batches = [batch(10 * step + 3 * world.rank + i, 5 + 7 * i + world.rank) for i in range(3)]
            targets = world.sum([float(sum(b.num_target_tokens for b in batches))])[0]
            engine.forward_backward(batches, targets)
            engine.clip(1.0)
            engine.step(1e-3)
            hashes.append(engine.check_replicas())
        if world.rank == 1:
            with torch.no_grad():
                next(model.parameters())[0, 0] += 1
        try:
            engine.check_replicas()
            tampering = "not noticed"
        except RuntimeError as error:
            tampering = str(error)
        report = {
            "synchronized_buckets": len(buckets),
            "buckets": len(set(buckets)),
            "hashes": hashes,
            "own_seed_hash": own,
            "after_tampering": tampering,
        }
        # The hook is Python: it must be gone before the process group that would call it.
        del engine
        gc.collect()
        (Path(sys.argv[1]) / f"rank-{world.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()

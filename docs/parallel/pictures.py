"""Draws the pictures of docs/parallel/: each from real ranks, tensors, packs, schedules or results of this project.

python docs/parallel/pictures.py            all of them, into this folder; a minute or two
python docs/parallel/pictures.py zero.svg   one of them
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a thread for each process

import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
sys.path.append(str(ROOT / "docs"))

from drawing import BY_RANK, DOCUMENT, INK, PALE, RANK, box, legend, link, picture, plain, rank_rows  # noqa: E402

RANKS = len(RANK)


def collectives(folder: Path) -> None:
    """What each rank has after each collective, computed by four processes."""
    from observed import collective_results

    found = collective_results(RANKS)
    with picture("collectives.svg", folder, 3, 3, (9, 6.6)) as grid:
        for axes, (name, ranks) in zip(grid.flat, found.items(), strict=True):
            plain(axes, name.replace("_", "-"), ticks=False)
            for rank, elements in enumerate(ranks):
                axes.text(-0.3, rank + 0.4, f"rank {rank}", ha="right", va="center", fontsize=7, color=INK)
                for place, (owner, element) in enumerate(elements):
                    color = INK if owner is None else RANK[owner]
                    box(
                        axes,
                        (place, rank),
                        (1, 0.8),
                        color,
                        f"Σ{element}" if owner is None else "abcd"[owner] + str(element),
                    )
            axes.set_xlim(-1.8, max(4, max(map(len, ranks))) + 0.2)
            axes.set_ylim(RANKS, -0.2)


def data(folder: Path) -> None:
    """A step of the embedded corpus on four ranks: as the plan deals it, and its packs at random."""
    import multipack

    plan, step = real_plan()
    cost = plan.cost_model.cost(plan.slots)
    dealt = list(plan.deal(step, RANKS, "step"))
    documents = np.sort(plan.documents(step))
    filled = multipack.pack(plan.slots[documents], plan.capacity, method="next_fit")
    ways = {
        "dealt by the plan": dealt,
        "the same documents, packed in their order and dealt in turn": [documents[pack] for pack in filled],
    }
    most = max(
        cost[np.concatenate(packs[rank::RANKS])].sum() for packs in ways.values() for rank in range(RANKS)
    )
    with picture("data.svg", folder, 2, 1, (9, 3.6)) as grid:
        for axes, (title, packs) in zip(grid.flat, ways.items(), strict=True):
            ends = []
            for rank in range(RANKS):
                at = 0.0
                for pack in packs[rank::RANKS]:
                    for document in pack:
                        width = cost[document] / most
                        box(axes, (at, rank), (width, 0.8), DOCUMENT[int(document) % 8])
                        at += width
                    axes.plot([at, at], [rank, rank + 0.8], color=INK, linewidth=1)
                ends.append(at)
            for rank, end in enumerate(ends):
                box(axes, (end, rank), (max(ends) - end, 0.8), PALE)
            idle = 1 - np.mean(ends) / max(ends)
            wait = f"{title}: {len(packs)} packs, ranks wait for {idle:.1%} of the step (gray)"
            plain(axes, wait, "cost of the step's documents; lines end packs" if packs is not dealt else "")
            axes.set_xlim(0, 1.01)
            rank_rows(axes)


def reading(folder: Path) -> None:
    """Which rank reads which documents of a store, and what independent draws miss, from benchmarks/results/draws.json."""
    plan, _ = real_plan()
    rows = json.loads((ROOT / "benchmarks" / "results" / "draws.json").read_text())["rows"]
    with picture("reading.svg", folder, 1, 2, (9, 2.9)) as ((left, right),):
        for step in range(min(plan.num_steps, 40)):
            dealt = list(plan.deal(step, RANKS, "step"))
            for rank in range(RANKS):
                own = np.concatenate(dealt[rank::RANKS])
                left.scatter(own, np.full(len(own), step), s=1.2, color=RANK[rank], rasterized=True)
        plain(
            left,
            "a plan: who reads which document, in which step",
            "place of the document in the store",
            "step",
        )
        legend(left, BY_RANK, 0.22, handlelength=1)
        sizes = sorted({row["ranks"] for row in rows})
        missed = {(row["way"], row["ranks"]): row["missed"] for row in rows}
        ways = {"plan": "#54a24b", "own shuffles": "#f58518", "with replacement": "#e45756"}
        for number, (way, color) in enumerate(ways.items()):
            at = np.arange(len(sizes)) + 0.27 * (number - 1)
            right.bar(at, [missed[way, size] for size in sizes], 0.25, color=color)
        plain(right, "documents that no rank reads in an epoch (of a plan: none)")
        right.set_xticks(range(len(sizes)), [f"{size} rank{'s' * (size > 1)}" for size in sizes])
        right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        legend(right, ways, 0.12)


def zero(folder: Path) -> None:
    """Bytes of a parameter that a rank of four holds and sends, counted in a step."""
    from method import INSTANTS, measure, parameters
    from multipack.parallel.parallel_config import ParallelConfig
    from parallel_tables.ranks import Ranks

    methods = ("ddp", "zero1", "zero2", "zero3", "hsdp")
    with Ranks(RANKS) as ranks:
        steps = {name: measure(ParallelConfig(data=name), ranks) for name in methods}
    kinds = {"parameters": "#4c78a8", "gradients": "#54a24b", "optimizer": "#f58518"}
    operations = dict(zip(("all-gather", "reduce-scatter", "all-reduce", "broadcast"), RANK, strict=True))
    with picture("zero.svg", folder, 1, 2, (9, 3.4)) as ((left, right),):
        for number, name in enumerate(methods):
            for place, instant in enumerate(INSTANTS):
                held = max((step.held[instant] for step in steps[name]), key=lambda held: sum(held.values()))
                below, at = 0.0, number + 0.21 * (place - 1.5)
                for kind, color in kinds.items():
                    left.bar(at, held[kind] / parameters(), 0.19, below, color=color)
                    below += held[kind] / parameters()
            sent, below = max((step.sent for step in steps[name]), key=lambda sent: sent.total()), 0.0
            for kind, color in operations.items():
                height = sent[kind.replace("-", "_")] / parameters()
                right.bar(number, height, 0.6, below, color=color)
                below += height
        unit = "bytes per parameter of the model"
        bars = "before the step, after a forward pass,\nafter the backward passes, after the optimizer"
        plain(left, f"held; four bars: {bars}", y=unit)
        plain(right, "sent in a step of four micro-batches", y=unit)
        legend(left, kinds)
        legend(right, operations)
        for axes in (left, right):
            axes.set_xticks(range(len(methods)), methods)


def offload(folder: Path) -> None:
    """Memory that a decoder adds to a process, in memory and with its state in files."""
    from offload import offloaded

    found, (own, files) = offloaded(), ("#f58518", "#eeca3b")
    with picture("offload.svg", folder, 1, 1, (9, 2.3)) as ((axes,),):
        names = list(found)[::-1]
        for number, name in enumerate(names):
            anonymous, resident = found[name]
            axes.barh(number, anonymous, 0.6, color=own)
            axes.barh(number, resident - anonymous, 0.6, anonymous, color=files)
            axes.text(resident + 4, number, f"{resident:,.0f} MiB", va="center", fontsize=8, color=INK)
        axes.set_yticks(range(len(names)), names)
        plain(axes, "memory that a decoder of 29 million parameters adds to a process, MiB after two steps")
        legend(axes, {"the process's own": own, "pages of files, which the kernel may drop": files})


def tensor(folder: Path) -> None:
    """The pieces of one block's matrices on four ranks, to scale."""
    from observed import pieces_of_matrices

    pieces = pieces_of_matrices(RANKS)
    with picture("tensor.svg", folder, 2, (len(pieces) + 1) // 2, (9, 4.2)) as grid:
        for axes in grid.flat[len(pieces) :]:
            axes.set_visible(False)
        for axes, (name, (shape, owned)) in zip(grid.flat, pieces.items(), strict=False):
            for rank, (top, left, height, width) in enumerate(owned):
                whole = (height, width) == shape
                box(
                    axes, (left, top), (width, height), PALE if whole else RANK[rank], str(rank) * (not whole)
                )
            way = "every rank" if whole else "rows" if owned[0][3] == shape[1] else "columns"
            plain(axes, f"{name}\n{shape[0]} × {shape[1]}, {way}", ticks=False)
            axes.set_xlim(-1, 258)
            axes.set_ylim(max(shape[0], 140), -1)
            axes.set_aspect("equal", anchor="NW")


def context(folder: Path) -> None:
    """Which rank computes which part of the attention of a real pack."""
    from multipack.planning.cost import CostModel
    from multipack.planning.placement import place

    plan, step = real_plan(capacity=1024)
    pack = max(plan.packs(step), key=lambda numbers: int(plan.slots[numbers].max()))
    lengths = np.sort(plan.slots[pack])[::-1]
    ends = np.cumsum([*lengths, 1024 - lengths.sum()]).astype(int)
    placed = place(lengths, CostModel.from_shape(), RANKS, 1024 // RANKS)
    starts = (ends[:-1] - lengths)[placed.document] + placed.start
    pieces = [slice(*each) for each in zip(starts.tolist(), (starts + placed.sizes).tolist(), strict=True)]
    ways: dict[str, Callable[[int], Sequence[slice]]] = {
        "ulysses: every rank computes all of it\nfor a quarter of the heads": lambda rank: [
            slice(rank * 256, (rank + 1) * 256)
        ],
        "planned: short documents whole on a rank,\nlong ones head and tail on several": lambda rank: [
            piece for piece, owner in zip(pieces, placed.rank, strict=True) if owner == rank
        ],
    }
    with picture("context.svg", folder, 1, 2, (9, 4.7)) as (pair,):
        for axes, (title, chunks) in zip(pair, ways.items(), strict=True):
            for start, end in pairwise([0, *ends]):
                axes.fill([start, end, start], [start, end, end], color="#b8bec9", linewidth=0)
            for rank in range(RANKS):
                for rows in chunks(rank):
                    axes.fill_betweenx([rows.start, rows.stop], -44, -10, color=RANK[rank], linewidth=0)
                    if axes is pair[1]:
                        draw_rows(axes, rows, [0, *ends], RANK[rank])
            plain(axes, title, "key", "query; left bar: who has the token")
            axes.set_xlim(-46, 1024)
            axes.set_ylim(1024, 0)
            axes.set_aspect("equal")
        legend(pair[0], BY_RANK, loc="upper right")


def draw_rows(axes: Any, rows: slice, ends: Sequence[int], color: str) -> None:
    """The part of the causal attention inside documents that these query rows have."""
    for start, end in pairwise(ends):
        top, bottom = max(start, rows.start), min(end, rows.stop)
        if top < bottom:
            axes.fill([start, top, bottom, start], [top, top, bottom, bottom], color=color, linewidth=0)


def pipeline(folder: Path) -> None:
    """The passes of four ranks under each schedule, in the order in which real ranks ran them."""
    from observed import passes_of_stages

    found = passes_of_stages(RANKS, micro_batches=8)
    colors = {"forward": "#4c78a8", "backward": "#54a24b", "waits": PALE}
    colors |= {"forward, second stage": "#2f4b6b", "backward, second stage": "#2f6b3a"}
    with picture("pipeline.svg", folder, len(found), 1, (9, 5.4)) as grid:
        longest = max(end for passes in found.values() for *_, end in passes)
        for axes, (schedule, passes) in zip(grid.flat, found.items(), strict=True):
            last = max(end for *_, end in passes)
            box(axes, (0, 0), (last, RANKS - 0.1), PALE)
            for rank, stage, number, backward, start, end in passes:
                name = ("backward" if backward else "forward") + ", second stage" * (stage >= RANKS)
                box(axes, (start, rank), (end - start, 0.9), colors[name], str(number))
            idle = 1 - sum(end - start for *_, start, end in passes) / (RANKS * last)
            plain(axes, f"{schedule}: ranks wait for {idle:.0%} of the step")
            axes.set_xlim(0, longest)
            rank_rows(axes)
        legend(axes, colors, 0.05)


def mesh(folder: Path) -> None:
    """Eight ranks in three dimensions: stages, shards, halves of matrices."""
    from observed import places

    from multipack.parallel.parallel_config import ParallelConfig

    config = ParallelConfig(data="zero3", pipeline=2, tensor=2)
    words = "parallel.pipeline=2 parallel.data=zero3 parallel.tensor=2"
    with picture("three-d.svg", folder, 1, 1, (9, 3.7)) as ((axes,),):
        plain(axes, f"{words} on 8 ranks, 4 layers", ticks=False)
        spots = {}
        for rank, place in enumerate(places(config, 8, layers=4)):
            spots[rank] = (4.4 * place.shard + 2.1 * place.tensor, 2.1 * place.stage)
            text = f"rank {rank}\nlayers {place.layers[0]}–{place.layers[-1]}, half {place.tensor}\nshard {place.shard}; packs {'AB'[place.shard]}"
            box(axes, spots[rank], (1.7, 1.2), RANK[2 * place.stage + place.shard], text)
        for one in range(0, 8, 2):
            (left, top), (right, _) = spots[one], spots[one + 1]
            link(axes, (left + 1.7, top + 0.6), (right, top + 0.6), "tensor", "#1c2330")
        for one in range(4):
            middle = spots[one][0] + 0.85
            link(axes, (middle, 1.2), (middle, 2.1), "pipeline", "#c2570c")
        shards = (
            (0, -0.3, "shards of the same half"),
            (1, -0.48, ""),
            (4, 3.6, "shards of the same half"),
            (5, 3.78, ""),
        )
        for one, height, word in shards:
            link(axes, (spots[one][0] + 0.85, height), (spots[one + 2][0] + 0.85, height), word, "#0067a8")
        axes.set_xlim(-0.2, 8.5)
        axes.set_ylim(4.1, -0.8)


def choosing(folder: Path) -> None:
    """What `multipack advise` recommends for sizes of models and numbers of devices, with fast and slow links."""
    from multipack.launch.advise import advise
    from multipack.launch.advise_request import AdviseRequest
    from multipack.shapes import SHAPES

    models, devices = ["gpt2", "llama-1b", "llama-3b", "llama-8b", "llama-70b"], [2**n for n in range(9)]
    colors: dict[str, str] = {}
    palette = [*DOCUMENT, "#2f4b6b", "#2f6b3a", "#999999"]
    with picture("choosing.svg", folder, 1, 2, (9, 3.4)) as (pair,):
        for axes, kind in zip(pair, ("fast", "slow"), strict=True):
            for row, model in enumerate(models):
                for column, number in enumerate(devices):
                    request = AdviseRequest(devices=number, link=kind, model=SHAPES[model])
                    family, short = family_of(advise(request).chosen)
                    color = colors.setdefault(family, palette[len(colors)])
                    box(axes, (column, row), (1, 1), color, short.replace("·", "\n"))
            plain(axes, f"link={kind}", "devices of 80 GiB, eight a host")
            axes.set_xlim(0, len(devices))
            axes.set_ylim(len(models), 0)
            axes.set_xticks(np.arange(len(devices)) + 0.5, devices)
            axes.set_yticks(np.arange(len(models)) + 0.5, models)
        legend(pair[0].figure, colors, loc="outside lower center", ncols=4, frameon=False)


def family_of(candidate: Any) -> tuple[str, str]:
    """(family of a recommendation, its name in a few letters)."""
    if candidate is None:
        return "nothing fits", ""
    config = candidate.config
    divided = [name for name in ("tensor", "pipeline", "context") if getattr(config, name) > 1]
    short = "·".join([config.data, *(f"{name[0]}{getattr(config, name)}" for name in divided)])
    if candidate.request.adapter.name != "none":
        return "QLoRA instead of all weights", "qlora"
    if config.offload != "none":
        return "offload", short
    from multipack.parallel.optimizers import DEFAULT_OPTIMIZER

    if candidate.optimizer != DEFAULT_OPTIMIZER:
        return "smaller optimizer states", short
    if len(divided) > 1 or (divided and config.shards_parameters):
        return "several", short
    return (divided[0] if divided else "replicas" if config.data == "ddp" else "ZeRO, FSDP"), short


def real_plan(capacity: int = 2048) -> tuple[Any, int]:
    """A plan of the embedded corpus with 16 packs a step, and a step in its middle."""
    import multipack
    from multipack.data.views.corpus import load_corpus
    from multipack.training.run_config import compose

    config = compose([])
    corpus = load_corpus(config.data, config.tokenizer, limit=capacity)
    plan = multipack.plan(corpus.train.lengths, capacity=capacity, packs_per_step=16)
    return plan, plan.num_steps // 2


PICTURES: dict[str, Callable[[Path], None]] = {
    "collectives.svg": collectives,
    "data.svg": data,
    "reading.svg": reading,
    "zero.svg": zero,
    "offload.svg": offload,
    "tensor.svg": tensor,
    "context.svg": context,
    "pipeline.svg": pipeline,
    "three-d.svg": mesh,
    "choosing.svg": choosing,
}


def main(names: Sequence[str], folder: Path = HERE) -> None:
    """Draw some pictures, or all."""
    for name in names or PICTURES:
        PICTURES[name](folder)
        print(f"wrote {folder / name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

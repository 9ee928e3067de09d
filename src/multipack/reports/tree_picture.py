"""Packs whose documents share their beginnings, drawn as text: a document a row, from the depth where it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multipack.planning.lengths import check_integer

if TYPE_CHECKING:
    from multipack.planning.plan import Plan

SHARED = "·"
"""A character of tokens that are computed in a document above."""


def draw_trees(
    plan: Plan,
    step: int,
    *,
    letters: str,
    tokens_per_character: int | None = None,
    columns: int = 72,
    max_documents: int = 24,
    max_packs: int = 8,
) -> str:
    """Draw the packs of a step of a plan of items; arguments as of `draw_step`.

    Args:
        plan: a plan made of `Items`.
        step: index of the step.
        letters: those of the documents of a pack, used cyclically.
        tokens_per_character: None = the smallest power of two at which the longest document fits into one row.
        columns: maximum characters of a row.
        max_documents: maximum number of documents drawn of a pack.
        max_packs: maximum number of packs drawn.
    """
    items, packs = plan.items, plan.packs(step)
    assert items is not None
    documents = plan.documents(step)
    tokens, longest = plan.tokens(step), int(plan.lengths[documents].max())
    scale = tokens_per_character or 1 << (-(-longest // columns) - 1).bit_length()
    check_integer("tokens_per_character", scale)
    slots = int(plan.slots[packs.order].sum())
    lines = [
        f"step {step % plan.num_steps} of {plan.num_steps:,}: {len(documents):,} documents of {tokens:,} tokens in"
        f" {slots:,} slots ({tokens / slots:.1%}); a character is {scale} token{'s' if scale > 1 else ''}, {SHARED} is"
        " computed above"
    ]
    for number, pack in enumerate(packs):
        if number == max_packs:
            lines.append(f"  … and {len(packs) - max_packs:,} more packs")
            break
        entries = items.entries(pack)
        inside, used = items.members.order[entries], int(plan.slots[pack].sum())
        held = int(plan.lengths[inside].sum())
        lines.append(
            f"pack {number}: {len(inside):,} documents of {held:,} tokens in {used:,} of {plan.capacity:,} slots"
        )
        for row, (document, again) in enumerate(
            zip(inside[:max_documents], items.shared[entries], strict=False)
        ):
            shared, end = (int(size) + scale // 2 for size in (again, plan.lengths[document]))
            own = max(end // scale - shared // scale, 1)
            lines.append(f"  {SHARED * (shared // scale)}{letters[row % len(letters)] * own}")
        if len(inside) > max_documents:
            lines.append(f"  … and {len(inside) - max_documents:,} more documents")
    return "\n".join(lines)

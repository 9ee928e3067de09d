"""Common beginnings of documents: sorted by tokens, each document shares its beginning with the one before it.

    order  document      tokens of their own        slots = Σ (length − shared)
      0    a b c d e f   a b c d e f                6
      1    a b c d g     . . . . g                  1
      2    a b h         . . h                      1
      3    i j           i j                        2

Two documents share the first `shared(c)` of the c tokens that they have in common. This depends on these two documents
only, so that documents never need more slots together than in parts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import Compiled
from multipack.planning.lengths import Integers

Tokens = NDArray[np.unsignedinteger]

GRAIN = 4
"""Beginnings are shared in multiples of this number of tokens, because every node of a tree costs time."""
LARGEST_TOKEN = (1 << 21) - 2
"""Three tokens are compared as one integer of 63 bits."""


def shared(common: Integers, min_prefix: int) -> Integers:
    """Shared tokens of `common` equal ones: 0 below `min_prefix`, else a multiple of min(`GRAIN`, `min_prefix`)."""
    grain = min(GRAIN, min_prefix)
    return np.where(common < min_prefix, 0, common // grain * grain)


@Compiled
def _key(tokens: Tokens, start: int, length: int, depth: int) -> int:
    """The tokens depth … depth + 2 of a document as one integer; the end of a document comes before every token."""
    key = 0
    for place in range(depth, depth + 3):
        key <<= 21
        if place < length:
            key += int(tokens[start + place]) + 1
    return key


@Compiled
def sort_by_tokens(tokens: Tokens, starts: Integers, lengths: Integers) -> Integers:
    """(documents,) document numbers in the order of their tokens.

    A document comes before longer ones that it begins; equal ones are in the order of their numbers.

    Args:
        tokens: flat tokens, each at most `LARGEST_TOKEN`.
        starts: (documents,) place of each document's first token.
        lengths: (documents,) tokens of each document.
    """
    # Multikey quicksort with cached keys (Bentley and Sedgewick 1997; Ng and Kakehi 2007). A segment [low, high) of
    # `order` has the first `depth` tokens in common. With depth -1 its documents are equal, and the keys their numbers.
    order, keys = np.arange(len(starts)), np.empty(len(starts), dtype=np.int64)
    stack = np.empty((64, 3), dtype=np.int64)
    stack[0, 0], stack[0, 1], stack[0, 2] = 0, len(order), 0
    size, fresh = 1, True
    while size > 0:
        size -= 1
        low, high, state = stack[size, 0], stack[size, 1], stack[size, 2]
        # An even state says that keys must be read: state = 2 · (depth + 1), plus 1 where the keys are there.
        if fresh:
            state, fresh = 2, False
        depth, known = state // 2 - 1, state % 2 == 1
        if high - low < 2:
            continue
        if not known:
            for place in range(low, high):
                document = order[place]
                keys[place] = (
                    document if depth < 0 else _key(tokens, starts[document], lengths[document], depth)
                )
        first, middle, last = keys[low], keys[(low + high) // 2], keys[high - 1]
        pivot = max(min(first, middle), min(max(first, middle), last))
        below, place, above = low, low, high
        while place < above:
            key = keys[place]
            if key < pivot:
                order[place], order[below] = order[below], order[place]
                keys[place], keys[below] = keys[below], key
                below, place = below + 1, place + 1
            elif key > pivot:
                above -= 1
                order[place], order[above] = order[above], order[place]
                keys[place], keys[above] = keys[above], key
            else:
                place += 1
        if size + 3 > len(stack):
            larger = np.empty((2 * len(stack), 3), dtype=np.int64)
            larger[: len(stack)] = stack
            stack = larger
        stack[size, 0], stack[size, 1], stack[size, 2] = low, below, state | 1
        stack[size + 1, 0], stack[size + 1, 1], stack[size + 1, 2] = above, high, state | 1
        size += 2
        if depth >= 0:
            ended = pivot & ((1 << 21) - 1) == 0
            stack[size, 0], stack[size, 1] = below, above
            stack[size, 2] = 0 if ended else 2 * (depth + 4)
            size += 1
    return order


@Compiled
def common_prefixes(tokens: Tokens, starts: Integers, lengths: Integers, order: Integers) -> Integers:
    """(documents,) first tokens that each document of `order` has in common with the one before it; 0 for the first."""
    found = np.zeros(len(order), dtype=np.int64)
    for number in range(1, len(order)):
        before, here = order[number - 1], order[number]
        most = min(lengths[before], lengths[here])
        first, second, count = starts[before], starts[here], 0
        while count < most and tokens[first + count] == tokens[second + count]:
            count += 1
        found[number] = count
    return found


@Compiled
def cut(lengths: Integers, shared: Integers, limit: int) -> NDArray[np.bool_]:
    """Divide sorted documents into trees of at most `limit` slots, repeating as few tokens as possible.

    A cut before a document repeats the tokens that it shares with the one before. Of all divisions into runs
    of neighbors this one repeats the fewest, found by a dynamic program over the last cut. Where a cut
    repeats no token, there is one.

    Args:
        lengths: (documents,) tokens, in the order of `sort_by_tokens`, none above the limit.
        shared: (documents,) tokens shared with the document before.
        limit: maximum slots of a tree.

    Returns:
        (documents,) whether a tree begins with the document.
    """
    # A queue holds the beginnings from which a tree may reach the current document, with rising repeated tokens.
    count = len(lengths)
    # Least repeated tokens of a tree that begins here, and of the trees before it.
    repeated = np.zeros(count + 1, dtype=np.int64)
    ends = np.zeros(count + 1, dtype=np.int64)
    chosen, queue = np.zeros(count + 1, dtype=np.int64), np.empty(count + 1, dtype=np.int64)
    head, tail, least = 0, 0, 0
    for place in range(count):
        again = shared[place] if place > 0 else 0
        ends[place + 1] = ends[place] + lengths[place] - again
        repeated[place] = least + again
        while tail > head and repeated[queue[tail - 1]] >= repeated[place]:
            tail -= 1
        queue[tail] = place
        tail += 1
        while True:
            begin = queue[head]
            repeat = shared[begin] if begin > 0 else 0
            if ends[place + 1] - ends[begin] + repeat <= limit or head + 1 == tail:
                break
            head += 1
        chosen[place + 1], least = queue[head], repeated[queue[head]]
    begins = np.zeros(count, dtype=np.bool_)
    place = count
    while place > 0:
        place = chosen[place]
        begins[place] = True
    return begins


@Compiled
def least_slots(lengths: Integers, shared: Integers, capacity: int) -> int:
    """A proven lower bound on the slots of any packs that hold these documents.

    The documents below a node of depth p have d distinct tokens below it. A pack that holds some of them holds the
    node's path, so at most capacity − p of these tokens; at least ⌈d / (capacity − p)⌉ packs do, each with the node.

    Args:
        lengths: (documents,) tokens, in the order of `sort_by_tokens`, none above the capacity.
        shared: (documents,) tokens shared with the document before.
        capacity: maximum slots of a pack.
    """
    # Nodes are closed from the deepest; `inside` sums the distinct tokens below each open node.
    depths, inside = np.zeros(64, dtype=np.int64), np.zeros(64, dtype=np.int64)
    size, total = 1, 0
    for place in range(1, len(lengths) + 1):
        depth = shared[place] if place < len(lengths) else 0
        end, below = lengths[place - 1], 0
        while True:
            attached = max(depths[size - 1], depth)
            packs = max(1, -(-below // (capacity - end))) if below > 0 else 1
            total += (end - attached) * packs
            below += end - attached
            if depths[size - 1] < depth:
                if size == len(depths):
                    longer, sums = np.zeros(2 * size, dtype=np.int64), np.zeros(2 * size, dtype=np.int64)
                    longer[:size], sums[:size] = depths, inside
                    depths, inside = longer, sums
                depths[size], inside[size] = depth, 0
                size += 1
            inside[size - 1] += below
            if depths[size - 1] <= depth:
                break
            size -= 1
            end, below = depths[size], inside[size]
    return total

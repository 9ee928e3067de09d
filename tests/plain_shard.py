"""A shard by a plain loop over its documents."""

import hashlib

import numpy as np

from multipack.data.stores.shards import chain


def plain(items, tokenizer, dedup=False, answers=2):
    """Arrays of a shard, and the hash of its documents, document by document; of an item `answers` are compared."""
    digests, seen, tokens, spans, names, weights = [], set(), [], [], [], []
    ends = {name: [0] for name in ("offsets", "span_offsets", "name_offsets")}
    for item in items:
        own = tuple((document.parts, document.takes_end) for document in item[:answers])
        has_tokens = all(any(part.text for part in document.parts) for document in item)
        if (dedup and own in seen) or not has_tokens:
            continue
        seen.add(own)
        for document in item:
            ids, ranges = [], []
            for part in [*document.parts, *[None] * document.takes_end]:
                begin = len(ids)
                if part is None:
                    ids.append(tokenizer.end_id)
                else:
                    ids += (
                        [tokenizer.special_id(part.text)] if part.is_special else tokenizer.encode(part.text)
                    )
                if (part is None or part.is_target) and len(ids) > begin:
                    if ranges and ranges[-1][1] == begin:
                        begin, _ = ranges.pop()
                    ranges.append([begin, len(ids)])
            name, ids = document.name.encode(), np.array(ids, np.uint16)
            ranges = np.array(ranges, np.int64).reshape(-1, 2)
            weight = b"" if document.weight == 1 else np.float64(document.weight).tobytes()
            begin = f"{len(ids)} {len(ranges)} ".encode() + name
            digest = hashlib.blake2b(begin + ids.tobytes() + ranges.tobytes() + weight, digest_size=15)
            digests.append((int.from_bytes(digest.digest(), "big"), 1))
            weights.append(document.weight)
            for values, more in zip(ends.values(), (ids, ranges, name), strict=True):
                values.append(values[-1] + len(more))
            tokens.append(ids)
            spans.append(ranges)
            names.append(name)
    arrays = {key: np.int64(values) for key, values in ends.items()}
    arrays |= {"tokens": np.concatenate([np.uint16([]), *tokens])}
    arrays["spans"] = np.concatenate([np.zeros((0, 2), np.int64), *spans])
    arrays |= {"names": np.frombuffer(b"".join(names), np.uint8), "weights": np.float64(weights)}
    if (arrays["weights"] == 1).all():
        arrays["weights"] = np.zeros(0)
    return arrays, chain(digests)

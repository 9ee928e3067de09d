"""Documents as flat arrays of tokens: what tokenizing gives, a finished part holds, and a store's writer takes.

    documents     [Part, Part] [Part] …            text, a batch of it
    encode        |AAAAAA|BBB|CC…                  TokenBlock: tokens, lengths, ranges of targets, names

A block travels between processes, and lies on the disk, as the bytes of a safetensors file.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from multipack.data.header import dtype_of
from multipack.data.source_document import Part, SourceDocument
from multipack.data.tokenizer import Tokenizer

EncodedPart = tuple[Sequence[int], bool]
"""Tokens, and whether they are targets."""


@dataclass(frozen=True)
class TokenBlock:
    """Some documents, one behind the other.

    Attributes:
        tokens: (tokens,) uint16 or uint32, as `dtype_of` says.
        lengths: (documents,) int64 tokens of each document.
        spans: (spans, 2) int64 ranges of targets, each counted from the first token of its document.
        span_counts: (documents,) int64 ranges of each document.
        borders: (documents,) int64 first token of the second half of a pair; 0 = no pair.
        names: (bytes,) uint8 names of the documents in UTF-8, one behind the other.
        name_lengths: (documents,) int64 bytes of each name.
        left_out: (1,) int64 documents that have no tokens, and are not in the block.
    """

    tokens: NDArray[np.unsignedinteger]
    lengths: NDArray[np.int64]
    spans: NDArray[np.int64]
    span_counts: NDArray[np.int64]
    borders: NDArray[np.int64]
    names: NDArray[np.uint8]
    name_lengths: NDArray[np.int64]
    left_out: NDArray[np.int64]

    @property
    def num_left_out(self) -> int:
        """See `left_out`."""
        return int(self.left_out[0])

    @property
    def documents_read(self) -> int:
        """Documents that became this block, those without tokens among them."""
        return len(self.lengths) + self.num_left_out

    def to_bytes(self) -> bytes:
        """The content of a safetensors file."""
        return save({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_bytes(cls, content: bytes) -> TokenBlock:
        """What `to_bytes` gave.

        Raises:
            ValueError: it is damaged.
        """
        try:
            arrays = load(content)
            block = cls(**{field.name: arrays[field.name] for field in fields(cls)})
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"not a block of tokens: {error}") from error
        right = (
            block.lengths.sum() == len(block.tokens)
            and block.span_counts.sum() == len(block.spans)
            and block.name_lengths.sum() == len(block.names)
        )
        if not right:
            raise ValueError("a block of tokens contradicts itself")
        return block

    @classmethod
    def joined(cls, blocks: Sequence[TokenBlock]) -> TokenBlock:
        """Blocks (one or more) one behind the other."""
        parts = {
            field.name: np.concatenate([getattr(block, field.name) for block in blocks])
            for field in fields(cls)
        }
        return cls(**{**parts, "left_out": parts["left_out"].sum(keepdims=True)})


class BlockBuilder:
    """Makes a block of documents that are tokenized.

    Args:
        vocabulary_size: every token is less than this.
    """

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._tokens, self._spans, self._names = array("q"), array("q"), bytearray()
        self._lengths, self._span_counts = array("q"), array("q")
        self._borders, self._name_lengths = array("q"), array("q")
        self.left_out = 0

    def add(self, name: str, parts: Sequence[EncodedPart], border: int = 0) -> None:
        """Add a document.

        Args:
            name: for people.
            parts: its tokens in pieces. Neighboring targets become one range, but none crosses the border.
            border: first token of the second half of a pair; 0 = no pair.
        """
        length, first = 0, len(self._spans)
        for ids, is_target in parts:
            if is_target and ids:
                if len(self._spans) > first and self._spans[-1] == length and length != border:
                    self._spans[-1] += len(ids)
                else:
                    self._spans.extend((length, length + len(ids)))
            length += len(ids)
            self._tokens.fromlist(ids if isinstance(ids, list) else list(ids))
        raw = name.encode("utf-8", "replace")
        self._names += raw
        self._lengths.append(length)
        self._span_counts.append((len(self._spans) - first) // 2)
        self._borders.append(border)
        self._name_lengths.append(len(raw))

    def finish(self) -> TokenBlock:
        """The block.

        Raises:
            ValueError: a token outside the vocabulary.
        """
        tokens = _numbers(self._tokens)
        check_tokens(tokens, self._vocabulary_size)
        return TokenBlock(
            tokens=tokens.astype(dtype_of(self._vocabulary_size)),
            lengths=_numbers(self._lengths),
            spans=_numbers(self._spans).reshape(-1, 2),
            span_counts=_numbers(self._span_counts),
            borders=_numbers(self._borders),
            names=np.frombuffer(bytes(self._names), dtype=np.uint8),
            name_lengths=_numbers(self._name_lengths),
            left_out=np.array([self.left_out], dtype=np.int64),
        )


def _numbers(values: array[int]) -> NDArray[np.int64]:
    return np.frombuffer(values, dtype=np.int64) if values else np.zeros(0, dtype=np.int64)


def check_tokens(tokens: NDArray[np.integer], vocabulary_size: int) -> None:
    """Refuse tokens outside the vocabulary.

    Raises:
        ValueError: there are some.
    """
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary_size:
        raise ValueError(
            f"tokens from {tokens.min()} to {tokens.max()} for a vocabulary of {vocabulary_size:,} tokens"
        )


def encode(documents: Sequence[SourceDocument], tokenizer: Tokenizer) -> TokenBlock:
    """Tokenize documents, and end those that do not end themselves.

    A pair has two halves, and each ends. Documents (of pairs: with a half) without tokens are left out and counted.

    Raises:
        ValueError: text that the tokenizer does not know; the message names its document.
    """
    builder = BlockBuilder(tokenizer.vocabulary_size)
    encoded = _encode(documents, tokenizer)
    for document, parts in zip(documents, encoded, strict=True):
        halves = [parts[: document.border], parts[document.border :]] if document.border else [parts]
        if not all(any(ids for ids, _ in half) for half in halves):
            builder.left_out += 1
            continue
        if document.ended and not document.closed and tokenizer.end_id is not None:
            for half in halves:
                half.append(([tokenizer.end_id], True))
        border = sum(len(ids) for ids, _ in halves[0]) if document.border else 0
        builder.add(document.name, [part for half in halves for part in half], border)
    return builder.finish()


def _encode(documents: Sequence[SourceDocument], tokenizer: Tokenizer) -> list[list[tuple[list[int], bool]]]:
    try:
        return tokenizer.encode_parts([document.parts for document in documents])
    except ValueError:
        for document in documents:  # which one was it?
            try:
                tokenizer.encode_parts([document.parts])
            except ValueError as error:
                raise ValueError(f"{document.name}: {error}") from error
        raise


def documents_to_bytes(documents: Sequence[SourceDocument]) -> bytes:
    """Documents as they travel to another process."""
    rows = [(one.name, one.parts, one.ended, one.closed, one.border) for one in documents]
    return json.dumps(rows, ensure_ascii=False, check_circular=False).encode("utf-8", "surrogatepass")


def documents_from_bytes(content: bytes) -> list[SourceDocument]:
    """What `documents_to_bytes` gave."""
    rows = json.loads(content.decode("utf-8", "surrogatepass"))
    return [
        SourceDocument(name, tuple(Part(*part) for part in parts), ended, closed, border)
        for name, parts, ended, closed, border in rows
    ]

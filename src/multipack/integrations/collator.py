"""`PackedDataCollator`: documents of a data set → the inputs of a transformers model; their lengths for the planner.

    features       {input_ids: a a a a a} {input_ids: b b} {input_ids: c c c}
    flattened      input_ids      a a a a a b b c c c         (1, T), no padding, no attention_mask
                   labels         − a a a a − b − c c         − is −100: no document predicts the next one
                   position_ids   0 1 2 3 4 0 1 0 1 2
                   seq_idx        0 0 0 0 0 1 1 2 2 2         (1, T) int32
                   cu_seq_lens_q  0 5 7 10                    (documents + 1,) int32, and cu_seq_lens_k
    4d_mask        the same row, and a mask (1, 1, T, T) instead of boundaries
    padded         one row per document and a mask of padding (documents, longest)

The keys have the names of transformers' `DataCollatorWithFlattening`. `use_cache=False` is one of them: a
model with a cache ignores document boundaries.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multipack.data.packs.batch import without_tokens
from multipack.data.views.documents import IGNORE
from multipack.ops.attention.masks import mask_4d
from multipack.ops.attention.model_inputs import check_rotations
from multipack.ops.attention.row_mask import makes_document_masks
from multipack.planning.lengths import check_integer, check_integers, short
from multipack.planning.options import check_choice
from multipack.shapes import RotationLimit

Integers = NDArray[np.int64]
Returns = Literal["flattened", "padded", "4d_mask"]

COLUMNS = ("input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks", "seq_lengths")
"""Columns of a data set that the collator reads; others are ignored."""

_ROWS = 10_000  # documents whose lengths are read at a time


@dataclass(frozen=True)
class PackedDataCollator:
    """Collates documents for transformers models; the `collate_fn` of a `DataLoader`.

    A document has `input_ids`, and may have `labels` (not shifted, −100 where nothing is learned; default: its tokens),
    TRL's `completion_mask` and `assistant_masks` instead, and an `attention_mask` whose zeros mark padding to remove.

    An empty list becomes one token without a label, so that a rank without documents runs the same collectives.

    Args:
        returns: form of a batch. `flattened`: one row of all documents with their boundaries. `padded`: one row per
            document, as conventional collators make. `4d_mask`: one row and a mask of T² elements, for models that
            read no boundaries.
        pad_id: token of padding.
        dtype: dtype of a mask, which is 0 or the lowest number of it: the model's.
        window: required for `4d_mask`: tokens that a token attends to, itself included; None = all before it in its
            document. A mapping {layer type: window} gives a mapping of masks, for models whose layers differ;
            `windows_of(config)` returns what a model needs. A model applies no windows of its own to a 4-D mask.
        limit: longest document; a longer one is an error. In a loop of your own use `isolation_probe(model).limit`:
            above it, the model rotates all documents of a row by the length of the longest.

    Raises:
        ValueError: an unknown choice, `4d_mask` without a window or a window without it, a dtype that is not floating.
    """

    returns: Returns = "flattened"
    pad_id: int = 0
    dtype: torch.dtype = torch.float32
    window: int | Mapping[str, int | None] | Literal["unknown"] | None = "unknown"
    limit: RotationLimit | None = None

    def __post_init__(self) -> None:
        check_choice("returns", self.returns, Returns)
        check_integer("pad_id", self.pad_id, 0)
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(
                f"dtype={self.dtype!r} must be a floating dtype of torch: the model's, as torch.bfloat16"
            )
        if self.returns == "4d_mask" and self.window == "unknown":
            raise ValueError(
                "returns='4d_mask' replaces the windows of a model: give window=windows_of(model.config), which is None"
                " for a model without"
            )
        if self.returns != "4d_mask" and self.window not in (None, "unknown"):
            raise ValueError(
                f"window={self.window!r} is of returns='4d_mask': with {self.returns!r} a model applies its own windows"
            )
        for window in self.window.values() if isinstance(self.window, Mapping) else [self.window]:
            if window not in (None, "unknown"):
                check_integer("window", window)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The inputs of `model(**inputs)` for a batch of documents.

        Raises:
            ValueError: a document is empty, is packed already, is longer than `limit`, or its columns have different
                lengths.
        """
        if not isinstance(features, Sequence):
            raise ValueError(f"a batch must be a list of documents, got {short(features)}")
        documents = [read_document(number, feature) for number, feature in enumerate(features)]
        documents = documents or [(np.array([self.pad_id]), np.array([IGNORE]))]
        return self._padded(documents) if self.returns == "padded" else self._row(documents)

    def _row(self, documents: list[tuple[Integers, Integers]]) -> dict[str, Any]:
        sizes = np.array([len(tokens) for tokens, _ in documents])
        check_rotations(self.limit, sizes, "the batch")
        ends = np.cumsum(sizes)
        starts = ends - sizes
        owner = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        labels = np.concatenate([labels for _, labels in documents])
        labels[starts] = IGNORE
        positions = np.arange(ends[-1]) - starts[owner]
        row = {
            "input_ids": np.concatenate([tokens for tokens, _ in documents]),
            "labels": labels,
            "position_ids": positions,
        }
        inputs: dict[str, Any] = {name: torch.from_numpy(values)[None] for name, values in row.items()}
        inputs["use_cache"] = False
        if self.returns == "4d_mask":
            return inputs | {"attention_mask": self._masks([0, *ends.tolist()])}
        boundaries = torch.from_numpy(np.append(0, ends).astype(np.int32))
        longest = int(sizes.max())
        return inputs | {
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
            "seq_idx": torch.from_numpy(owner)[None],
        }

    def _masks(self, bounds: list[int]) -> Tensor | dict[str, Tensor]:
        """(1, 1, T, T) the mask of documents with these bounds; with several windows, one for each type of layer."""
        batch = without_tokens(bounds)
        if isinstance(self.window, Mapping):
            return {kind: mask_4d(batch, self.dtype, window) for kind, window in self.window.items()}
        return mask_4d(batch, self.dtype, self.window)  # type: ignore[arg-type]

    def _padded(self, documents: list[tuple[Integers, Integers]]) -> dict[str, Any]:
        width = max(len(tokens) for tokens, _ in documents)
        rows = {"input_ids": self.pad_id, "labels": IGNORE, "attention_mask": 0}
        inputs = {name: torch.full((len(documents), width), value) for name, value in rows.items()}
        for row, (tokens, labels) in enumerate(documents):
            inputs["input_ids"][row, : len(tokens)] = torch.from_numpy(tokens)
            inputs["labels"][row, 1 : len(tokens)] = torch.from_numpy(labels[1:])
            inputs["attention_mask"][row, : len(tokens)] = 1
        return inputs | {"use_cache": False}


def read_document(number: int, feature: Mapping[str, Any]) -> tuple[Integers, Integers]:
    """(tokens,) int64 tokens and labels of a document, without padding; `number`: its place in the batch."""
    where = f"document {number} of the batch"
    if not isinstance(feature, Mapping):
        raise ValueError(f"{where} is {short(feature)}: it must be a mapping with input_ids")
    if feature.get("input_ids") is None:
        raise ValueError(f"{where} has no input_ids (it has {', '.join(map(str, feature))}): tokenize it")
    if feature.get("seq_lengths") is not None and np.size(feature["seq_lengths"]) > 1:
        raise ValueError(
            f"{where} holds {len(feature['seq_lengths'])} documents (seq_lengths): the data set is packed already; give"
            " the data set before it was packed (packing=False)"
        )
    try:
        columns = {name: _array(feature[name]) for name in COLUMNS[:-1] if feature.get(name) is not None}
    except ValueError as error:
        raise ValueError(f"{where} must be flat lists of integers: {error}") from None
    shape = columns["input_ids"].shape
    for name, values in columns.items():
        is_integer = values.dtype.kind in "iub" or not values.size
        if values.shape != shape or len(shape) != 1 or not is_integer:
            raise ValueError(
                f"{where} has {name} of {values.dtype} and shape {values.shape}, and input_ids of {shape}: tokens,"
                " labels and masks must be flat lists of integers of equal lengths"
            )
    tokens = columns["input_ids"].astype(np.int64, copy=False)
    labels = columns.get("labels", tokens).astype(np.int64, copy=False)
    if "labels" not in columns:
        for name in ("completion_mask", "assistant_masks"):
            if name in columns:
                labels = np.where(columns[name] == 0, IGNORE, labels)
    if "attention_mask" in columns:
        kept = columns["attention_mask"]
        if kept.max(initial=0) > 1:
            raise ValueError(
                f"{where} has an attention_mask with {kept.max()}, which marks several documents in a row: give one"
                " document per row"
            )
        tokens, labels = tokens[kept != 0], labels[kept != 0]
    if len(tokens) == 0:
        raise ValueError(
            f"{where} has no tokens: remove such documents, for example with"
            " dataset.filter(lambda row: len(row['input_ids']) > 0)"
        )
    return tokens, labels


def _array(values: Any) -> NDArray[Any]:
    """A column of a document; lists of integers are read three times as fast as by numpy."""
    if isinstance(values, list) and values:
        try:
            return np.frombuffer(array("q", values), np.int64)
        except (TypeError, OverflowError):  # no flat list of integers, which numpy describes
            pass
    return np.asarray(values)


def document_lengths(dataset: Any, column: str = "input_ids") -> Integers:
    """(documents,) int64 tokens of each document of a map-style data set.

    They are the data set's attribute `lengths` if it has one, or the lengths of a column in Arrow of a
    `datasets.Dataset`; of any other data set, every document is read once.

    Raises:
        ValueError: the data set has no length, no document, or none with that column.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"{type(dataset).__name__} has no length: packs are planned over all documents of a map-style data set;"
            " load it without streaming"
        )
    if hasattr(dataset, "lengths"):
        lengths = check_integers("the data set's attribute lengths", dataset.lengths)
        if len(lengths) != len(dataset):
            raise ValueError(
                f"the data set has {len(dataset):,} documents, and its attribute lengths has {len(lengths):,}: give one"
                " length a document, or remove the attribute"
            )
        return lengths
    if len(dataset) == 0:
        raise ValueError("the data set has no documents")
    names = getattr(dataset, "column_names", None)
    if names is None or dataset.format["type"] == "custom":
        return np.array([_length(dataset, number, column) for number in range(len(dataset))], dtype=np.int64)
    if column not in names:
        raise ValueError(_no_column(column, names))
    import pyarrow
    import pyarrow.compute

    pages = dataset.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS)
    try:
        parts = [pyarrow.compute.list_value_length(page[column]).fill_null(0).to_numpy() for page in pages]
    except pyarrow.ArrowNotImplementedError:  # the column holds no lists
        kind = dataset.features[column]
        raise ValueError(f"column {column} of the data set is {short(kind)}, not lists of tokens") from None
    return np.concatenate(parts).astype(np.int64)


def _length(dataset: Any, number: int, column: str) -> int:
    """Tokens of a document."""
    try:
        document = dataset[number]
        if isinstance(document, Mapping) and column not in document:
            raise ValueError(_no_column(column, document))
        return len(document[column])
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"document {number} of {len(dataset):,} must be a mapping with a list {column}: {error!r}"
        ) from error


def _no_column(column: str, names: Any) -> str:
    return (
        f"the data set has no column {column} (it has {', '.join(map(str, names))}): tokenize it first, for example"
        " with dataset.map(lambda row: tokenizer(row['text']))"
    )


def windows_of(config: Any) -> int | dict[str, int | None] | None:
    """The `window` of a `PackedDataCollator(returns="4d_mask")` for a transformers model.

    Args:
        config: the model's configuration.

    Raises:
        ValueError: not a configuration, layers whose attention is neither full nor a sliding window, or windows before
            transformers 4.53.
    """
    if not hasattr(config, "get_text_config"):
        raise ValueError(f"windows_of takes a model's config, got {short(config)}")
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and not makes_document_masks():
        raise ValueError(
            f"which layers of {config.model_type} have sliding_window={window} is known since transformers 4.53:"
            ' pip install -U "transformers>=4.53"'
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"{config.model_type} has layers of {', '.join(other)}, which a mask does not describe: use"
            " returns='flattened'"
        )
    if "sliding_attention" in kinds:  # such a model chooses a mask by the type of each layer
        return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
    return None if kinds else window

"""What preference training needs beside a model: reference log-probabilities, computed once and kept, and metrics.

    initial weights ─ packed, no gradient ─▶ (pairs, 2) ─▶ STORE/reference-<hash>.safetensors ─▶ PreferencePairs
                                                             read by every later run of the same weights and pairs

The hash is over the reference's weights, the precision in which it was asked, and the very pairs (the fingerprint of
their view), so that a file under its name is right whenever it is whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from multipack.atomic import write_atomically
from multipack.data.documents import Documents
from multipack.data.preference import PreferenceCollator, PreferencePairs
from multipack.data.sampler import PackedBatchSampler
from multipack.data.tokenizer import Tokenizer
from multipack.models.dpo import PreferenceDecoder, preference_metrics
from multipack.parallel.engine import ModelEngine
from multipack.parallel.materialize import weights_hash
from multipack.parallel.mesh import Mesh
from multipack.parallel.world import World
from multipack.training.callbacks.callback import Callback
from multipack.training.settings import PreferenceConfig
from multipack.training.weights import begin_from, initial_weights

FORMAT = "multipack-reference-1"
_BLOCK = 1 << 15  # values that ranks exchange at once


@dataclass(frozen=True)
class Reference:
    """Log-probabilities of pairs under the reference model.

    Attributes:
        values: (pairs, 2) float64: of chosen and rejected, each summed over its targets.
        file: where they are kept.
        note: what people should know: where they came from, and what was wrong with a file.
    """

    values: NDArray[np.float64]
    file: Path
    note: str


def with_reference(
    config: PreferenceConfig,
    engine: ModelEngine,
    views: Sequence[Documents],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    dtype: torch.dtype,
    capacity: int,
    pad_to: int | None = None,
    multiple: int = 1,
    progress: Callable[[int, int | None, str], None] | None = None,
) -> tuple[list[PreferencePairs], list[str]]:
    """Each view of pairs with what the reference model gives them, and notes for people.

    Args:
        config: says which model is the reference.
        engine: of the model to train, which still has the weights that the run begins with.
        views: training and validation documents.
        tokenizer: of both.
        folder: the token store's, where values are kept.
        dtype: the precision of forward passes.
        capacity: most tokens of a pack.
        pad_to: see `reference_log_probabilities`.
        multiple: likewise.
        progress: told how far it is.

    Raises:
        ValueError: documents that are no pairs, a reference of another tokenizer, or values that are not finite.
    """
    world, evaluating, mesh = engine.world, engine.evaluating, engine.mesh
    if config.reference:  # every rank holds it whole
        mesh = Mesh.plain(world)
        model = _reference_model(config, tokenizer).to(world.device)
        weights = weights_hash(model.named_parameters())
        evaluating = partial(_asking, model, world.device, dtype)
    else:
        weights = weights_hash(engine.whole_parameters())
    found = [
        reference_log_probabilities(
            evaluating,
            documents,
            folder,
            mesh,
            weights=weights,
            dtype=dtype,
            capacity=capacity,
            pad_to=pad_to,
            multiple=multiple,
            progress=progress,
        )
        for documents in views
    ]
    pairs = [PreferencePairs(view, each.values) for view, each in zip(views, found, strict=True)]
    return pairs, [each.note for view, each in zip(views, found, strict=True) if len(view)]


def _reference_model(config: PreferenceConfig, tokenizer: Tokenizer) -> PreferenceDecoder:
    """The model that `preference.reference` names; its shape may be another than that of the model to train."""
    initial = initial_weights(Path(config.reference).expanduser())
    size = max(initial.shape.vocabulary_size, tokenizer.vocabulary_size)
    shape = initial.shape.with_vocabulary(size)
    state, _ = begin_from(initial, shape, tokenizer, "preference.reference")
    with torch.device("meta"):
        model = PreferenceDecoder(shape)
    model.load_state_dict(state, assign=True)
    return model.eval()


@contextmanager
def _asking(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[nn.Module]:
    with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        yield model


def reference_log_probabilities(
    evaluating: Callable[[], AbstractContextManager[nn.Module]],
    documents: Documents,
    folder: Path,
    mesh: Mesh,
    *,
    weights: str,
    dtype: torch.dtype,
    capacity: int,
    pad_to: int | None = None,
    multiple: int = 1,
    progress: Callable[[int, int | None, str], None] | None = None,
) -> Reference:
    """What the reference model gives each pair: read where an earlier run has kept it, else computed and kept.

    Every rank takes part and computes its share of the packs.

    Args:
        evaluating: enters the reference, a `PreferenceDecoder`, in evaluation mode, without gradients, in the
            precision of forward passes; an engine's `evaluating`.
        documents: the pairs.
        folder: where the file is kept: the token store's.
        mesh: the ranks; those that hold one model ask it together.
        weights: hash of the reference's weights; see `weights_hash`.
        dtype: the precision of forward passes.
        capacity: most tokens of a pack; also slots of every pack where the engine wants one shape.
        pad_to: slots of every pack; None = as many as it has tokens.
        multiple: what these are a multiple of.
        progress: told how far it is.

    Raises:
        ValueError: a document that is no pair, or values that are not finite.
    """
    world = mesh.world
    key = {"format": FORMAT, "weights": weights, "dtype": str(dtype), "documents": documents.fingerprint}
    name = hashlib.sha256("\n".join(key.values()).encode()).hexdigest()[:32]
    file = folder / f"reference-{name}.safetensors"
    values, note = np.zeros((len(documents), 2)), ""
    outcome = world.on_main(lambda: _read(file, key, values))
    if outcome == "found":
        _share(values, world)
        return Reference(values, file, f"reference log-probabilities of {len(documents):,} pairs from {file}")
    if outcome:
        note = f"{file.name} was not usable ({outcome}) and is made anew; "
    _compute(values, evaluating, documents, mesh, capacity, (pad_to, multiple), progress)
    _share(values, world)
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
        raise ValueError(
            f"the reference model gives {documents.names(first)} the log-probabilities {values[first].tolist()}:"
            " it cannot be a reference; look at its weights (preference.reference, train.init_from)"
        )
    note += world.on_main(lambda: _write(file, key, values))
    return Reference(values, file, note)


def _compute(
    values: NDArray[np.float64],
    evaluating: Callable[[], AbstractContextManager[nn.Module]],
    documents: Documents,
    mesh: Mesh,
    capacity: int,
    slots: tuple[int | None, int],
    progress: Callable[[int, int | None, str], None] | None,
) -> None:
    """Fill in the rows of this rank's packs."""
    if not len(documents):
        return
    sampler = PackedBatchSampler(
        documents.lengths,
        capacity=capacity,
        packs_per_step=mesh.data_size,
        targets=documents.target_counts,
        rank=mesh.data_rank,
        world_size=mesh.data_size,
        order="given",
    )
    pairs, collate = PreferencePairs(documents), PreferenceCollator.of(sampler, slots[0], multiple=slots[1])
    done = 0
    with evaluating() as model:
        for numbers in sampler:
            batch = collate([pairs[number] for number in numbers])
            found = model(batch.to(mesh.world.device))  # a rank without pairs runs a pack of padding
            if numbers and mesh.is_replica_leader:
                values[numbers] = found.cpu().numpy()
            done += len(numbers)
            if progress is not None:
                progress(done, -(-len(documents) // mesh.data_size), "pairs asked of the reference")


def _share(values: NDArray[np.float64], world: World) -> None:
    """Every row is known to one rank and zero on the others: afterwards all know all."""
    if world.size == 1:
        return
    flat = values.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        flat[start : start + _BLOCK] = world.sum(flat[start : start + _BLOCK].tolist())


def _read(file: Path, key: Mapping[str, str], values: NDArray[np.float64]) -> str:
    """`found`, with `values` filled in; what is wrong with the file; or empty when there is none."""
    if not file.is_file():
        return ""
    try:
        with safe_open(file, framework="numpy") as opened:
            if opened.metadata() != dict(key):
                return "it is of other weights or pairs"
            part = opened.get_slice("log_probabilities")
            if tuple(part.get_shape()) != values.shape or part.get_dtype() != "F64":
                return f"it holds {part.get_dtype()} {part.get_shape()}, not F64 {list(values.shape)}"
            found = opened.get_tensor("log_probabilities")
    except (SafetensorError, OSError) as error:
        return str(error)
    if not np.isfinite(found).all():
        return "it holds values that are not finite"
    values[:] = found
    return "found"


def _write(file: Path, key: Mapping[str, str], values: NDArray[np.float64]) -> str:
    told = f"reference log-probabilities of {len(values):,} pairs computed"
    try:
        write_atomically(file, save({"log_probabilities": torch.from_numpy(values)}, metadata=dict(key)))
    except OSError as error:  # a store that others share may be read-only; the values are right all the same
        return f"{told}, but not kept ({error}): the next run computes them again"
    return f"{told} and kept in {file}"


PREFERENCE_LEGEND = {
    "reward_accuracy": "share of pairs whose chosen answer has the higher reward",
    "reward_margin": "mean difference of both rewards; a reward is beta × (log-probability − the reference's)",
    "reward_chosen": "mean reward of chosen answers",
    "reward_rejected": "mean reward of rejected answers",
}
"""Metric → meaning, for the run's legend."""


class PreferenceMetrics(Callback):
    """Puts the rewards of a step's pairs into its record: `reward_accuracy`, `reward_margin` and both means.

    Args:
        decoder: the model that is trained; what it has tallied is summed over ranks, without another pass.
    """

    name = "preference"
    legend: Mapping[str, str] = MappingProxyType(PREFERENCE_LEGEND)

    def __init__(self, decoder: PreferenceDecoder) -> None:
        self._decoder = decoder

    def gradient(self, step: int, engine: ModelEngine) -> Mapping[str, float]:
        """Means over the pairs of this step, on all ranks."""
        return preference_metrics(engine.world.sum(self._decoder.take_tally()))

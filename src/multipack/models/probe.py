"""`isolation_probe`: does a model keep the documents of a packed batch apart?

    documents   A A A A  B B B  C C C C      one small packed batch
    change A    x x x x  B B B  C C C C      outputs of B and C must stay the same
    alone                B B B               and equal B's processed alone

A dozen forwards over 27 tokens, without gradients. A leak is a change of outputs in a document that was not changed.
Wrong positions are not a leak, but a difference from the document alone. The report has the size of both, and the first
module that differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multipack.models.probe_batch import (
    Documents,
    PlacedBatch,
    draw_tokens,
    find_vocabulary_size,
    packed_batch,
    place,
    special_tokens,
    transformers_batch,
    wrong_fields,
)
from multipack.models.probe_report import IsolationReport, ProbeFinding
from multipack.models.probe_trace import Watched, first_module
from multipack.planning.lengths import short
from multipack.shapes import rotation_limit

LENGTHS = (9, 7, 11)
"""Tokens of the probe's documents. Their sum is rarely the width of a layer: a dimension of this
size is taken for the number of tokens."""
TOLERANCE = 1e-4
"""Largest difference of outputs, relative to the largest output, that counts as none in float32."""
MOST_BUFFER = 1 << 24
"""Elements of the largest buffer that is saved and restored."""
REMEDIES = {
    "leak": "train one document per row, or let the model read their bounds",
    "difference": "train one document per row, or let the model count positions and windows inside each",
    "refused": "train one document per row, or use a model that reads bounds",
    "not_finite": "check the weights and the dtype",
    "state": "reset the model's state (a cache, a hidden state) at every call",
    "future": "use a causal model (is_decoder=True for encoders), or a causal mask",
}
"""Cause of a finding about the model → what to do next."""
TRANSFORMERS_REMEDY = (
    "pack as PackedDataCollator does: one row, position_ids, use_cache=False, no attention_mask, transformers >= 4.53;"
    " if attention still mixes documents, use attn_implementation='multipack' or 'flash_attention_2', or"
    " PackedDataCollator(returns='4d_mask', window=windows_of(config)); else train one document per row"
)
"""The same for a leak or a difference of a model of transformers."""
LABELS = ("labels", "num_items_in_batch", "shift_labels")
"""Fields that are checked, and not given to the model: it returns logits without them."""


def isolation_probe(
    model: Callable[..., Any],
    make_batch: Callable[[Documents], Any] | None = None,
    *,
    forward: Callable[[Any], Any] | None = None,
    lengths: tuple[int, ...] = LENGTHS,
    vocabulary_size: int | None = None,
) -> IsolationReport:
    """Change one document of a packed batch, and watch the others.

    The model runs in evaluation mode without gradients; its mode, its buffers and the random generators are restored.

    Args:
        model: a causal model of transformers (also wrapped by peft), or a module or function of a `PackedBatch` (a
            `Decoder`) or of what `make_batch` returns.
        make_batch: lists of tokens → keyword arguments of the model, or its one argument: your collator. By default
            `transformers_batch` for a model of transformers, else a `PackedBatch`.
        forward: batch → logits; by default `model(**batch)` for a mapping, else `model.logits(batch)` if there is such
            a method, else `model(batch)`.
        lengths: tokens of each document. A sliding window, or a rotation by length (`IsolationReport.limit`), shows
            its effect only in documents that are longer.
        vocabulary_size: tokens are below it; by default the size of the embedding.

    Raises:
        ValueError: the batch does not hold the documents, or the outputs have no row for each token.
    """
    for name, given in {"model": model, "make_batch": make_batch or list, "forward": forward or list}.items():
        if not callable(given):
            raise ValueError(f"{name} must be a model or a function, got {short(given)}")
    probe = _Probe(model, make_batch, forward, lengths, vocabulary_size)
    with _undisturbed(model), torch.no_grad():
        return probe.report()


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Evaluation mode; afterwards modes, buffers and random generators are as before."""
    modes = [(module, module.training) for module in _modules(model)]
    buffers = [each for module, _ in modes for each in module.buffers(recurse=False)]
    before = [(buffer, buffer.clone()) for buffer in buffers if buffer.numel() <= MOST_BUFFER]
    devices = {
        each.device for module, _ in modes for each in module.parameters(recurse=False) if each.is_cuda
    }
    with torch.random.fork_rng(devices=list(devices)):
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, training in modes:
                module.training = training
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _modules(model: Any) -> list[nn.Module]:
    """The modules of a model; of a function, none."""
    return list(model.modules()) if isinstance(model, nn.Module) else []


class _Probe:
    """A model, a packed batch and its documents."""

    def __init__(
        self,
        model: Any,
        make_batch: Callable[[Documents], Any] | None,
        forward: Callable[[Any], Any] | None,
        lengths: tuple[int, ...],
        vocabulary_size: int | None,
    ) -> None:
        self.model, self.forward = model, forward
        self.config = getattr(model, "config", None)
        if not hasattr(self.config, "model_type"):
            self.config = None  # not a model of transformers
        self.make_batch = make_batch or (transformers_batch if self.config else packed_batch)
        parameters = (each for module in _modules(model) for each in module.parameters(recurse=False))
        parameter = next(parameters, torch.empty(0))
        self.device, self.dtype = parameter.device, parameter.dtype
        if torch.is_autocast_enabled(self.device.type):
            self.dtype = torch.get_autocast_dtype(self.device.type)
        size = find_vocabulary_size(model, self.config) if vocabulary_size is None else vocabulary_size
        self.documents, self.others = draw_tokens(lengths, size, special_tokens(self.config))
        self.noise = 0.0
        self.limit = rotation_limit(self.config)

    # --- running the model ------------------------------------------------------------------------

    def placed(self, documents: Documents) -> PlacedBatch:
        """The batch of these documents, on the model's device."""
        batch = place(self.make_batch([list(document) for document in documents]), documents)
        values = {
            name: value.to(self.device) for name, value in batch.values.items() if isinstance(value, Tensor)
        }
        return batch.with_values(**values)

    def outputs(self, batch: PlacedBatch) -> list[Tensor]:
        """(tokens, V) outputs of each document, in float64.

        Raises:
            ValueError: the model returns no row for each token.
        """
        out = self.run(batch)
        if isinstance(out, Mapping):  # as outputs of transformers are
            out = out.get("logits", out.get("last_hidden_state"))
        for name in ("logits", "last_hidden_state"):
            out = getattr(out, name, out)
        while isinstance(out, (tuple, list)):
            out = out[0]
        slots = batch.ids.numel()
        if not isinstance(out, Tensor) or out.dim() < 2 or out.shape[:-1].numel() != slots:
            shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"the model returns {shape} for {slots} tokens, and the probe needs logits for each: pass"
                " forward=lambda batch: …"
            )
        flat = out.reshape(slots, -1).double()
        return [flat[start:end] for start, end in batch.spans]

    def run(self, batch: PlacedBatch) -> Any:
        """Output of the model for a batch."""
        given = batch.given
        if isinstance(given, Mapping):
            given = {name: value for name, value in given.items() if name not in LABELS}
        if self.forward is not None:
            return self.forward(given)
        if isinstance(given, Mapping):
            return self.model(**given)
        return getattr(self.model, "logits", self.model)(given)

    def alone(self, number: int) -> PlacedBatch:
        """A batch of one document, for the model's ordinary call."""
        document = self.documents[number]
        if self.config is None or self.forward is not None:
            return self.placed([document])
        given: dict[str, Any] = {"input_ids": torch.tensor([document], device=self.device)}
        inner = getattr(self.model, "get_base_model", lambda: self.model)()
        if "use_cache" in inspect.signature(getattr(inner, "forward", inner)).parameters:
            given["use_cache"] = False
        return PlacedBatch(given, ((0, len(document)),))

    # --- measuring --------------------------------------------------------------------------------

    @property
    def tolerance(self) -> float:
        """Largest relative difference that counts as none.

        In 16 bits, kernels of different shapes round differently: measured on the first document, packed and alone.
        """
        epsilon = torch.finfo(self.dtype).eps if self.dtype.is_floating_point else 0.0
        return TOLERANCE if epsilon < TOLERANCE else min(max(4 * self.noise, epsilon), 16 * epsilon)

    @property
    def leak_tolerance(self) -> float:
        """Largest relative change by another document that counts as none.

        The batches have one shape, so that even 16-bit outputs are the same, except outputs of experts: the number of
        tokens that an expert computes together depends on the other documents.
        """
        names = {type(module).__name__.lower() for module in _modules(self.model)}
        has_experts = any("moe" in name or "expert" in name or "router" in name for name in names)
        return self.tolerance if has_experts else TOLERANCE

    def leaks(self, batch: PlacedBatch, base: list[Tensor]) -> dict[tuple[int, int], float]:
        """(changed document, affected document) → relative change of the affected one's outputs, `base`."""
        found = {}
        for source, tokens in enumerate(self.others):
            after = self.outputs(batch.with_tokens(source, tokens))
            for target, (one, two) in enumerate(zip(base, after, strict=True)):
                if target != source and not (size := _difference(one, two)) <= self.leak_tolerance:
                    found[source, target] = size
        return found

    def report(self) -> IsolationReport:
        """All findings; one that makes further comparisons meaningless ends the report early."""
        batch = self.placed(self.documents)
        findings = list(wrong_fields(batch))
        try:
            base = self.outputs(batch)
            alone = [self.outputs(self.alone(number))[0] for number in range(len(self.documents))]
        except Exception as error:
            if "forward=lambda" in str(error):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            text = f"the model refuses the packed batch: {type(error).__name__}: {reason}"
            return IsolationReport({}, (), (self._finding("refused", text), *findings), TOLERANCE)
        if not all(bool(torch.isfinite(part).any(1).all()) for part in [*base, *alone]):
            findings.append(self._finding("not_finite", "outputs are not finite"))
            return IsolationReport({}, (), tuple(findings), TOLERANCE)
        self.noise = _difference(alone[0], base[0])
        differences = tuple(_difference(one, two) for one, two in zip(alone, base, strict=True))
        leaks: dict[tuple[int, int], float] = {}
        longest = max(map(len, self.documents))
        if self.limit is not None and longest > self.limit.tokens and max(differences) > self.tolerance:
            text = f"{self.limit}, and others of their row too"
            remedy = f"pack documents of up to {self.limit.tokens:,} tokens"
            findings.append(ProbeFinding("rotation", text, remedy))
        elif any(
            _difference(*pair) > self.leak_tolerance for pair in zip(base, self.outputs(batch), strict=True)
        ):
            text = "the same batch has other outputs in a second call: the model keeps state between calls"
            findings.append(self._finding("state", text))
        else:
            leaks = self.leaks(batch, base)
            findings += self._future(batch, base)
            if leaks:
                findings.append(self._leak(batch, leaks))
            elif any(not size <= self.tolerance for size in differences):
                findings.append(self._mismatch(batch, differences))
        return IsolationReport(leaks, differences, tuple(findings), self.tolerance, self.limit)

    def _finding(self, cause: str, text: str) -> ProbeFinding:
        """A finding about the model."""
        is_theirs = self.config is not None and cause in ("leak", "difference")
        return ProbeFinding(cause, text, TRANSFORMERS_REMEDY if is_theirs else REMEDIES[cause])

    def _future(self, batch: PlacedBatch, base: list[Tensor]) -> list[ProbeFinding]:
        """The finding that outputs depend on later tokens of the same document; empty if they do not."""
        for number, tokens in enumerate(self.others):
            after = self.outputs(batch.with_tokens(number, tokens[-1:]))
            if not _difference(base[number][:-1], after[number][:-1]) <= self.leak_tolerance:
                text = f"outputs of document {number + 1} change with its last token: attention is not causal"
                return [self._finding("future", text)]
        return []

    def _leak(self, batch: PlacedBatch, leaks: dict[tuple[int, int], float]) -> ProbeFinding:
        """The first module that the largest leak goes through."""
        source, target = max(leaks, key=lambda pair: leaks[pair])
        changed = batch.with_tokens(source, self.others[source])
        watched = Watched(batch, target), Watched(changed, target)
        where = first_module(self.model, self.run, *watched, self.leak_tolerance)
        return self._finding("leak", f"documents of a row are mixed{where}")

    def _mismatch(self, batch: PlacedBatch, differences: tuple[float, ...]) -> ProbeFinding:
        """The first module of the document that differs most from itself alone."""
        number = differences.index(max(differences))
        watched = Watched(self.alone(number), 0), Watched(batch, number)
        where = first_module(self.model, self.run, *watched, self.tolerance)
        return self._finding("difference", f"packed and alone differ{where}")


def _difference(one: Tensor, two: Tensor) -> float:
    """Largest difference, relative to the largest value; entries that are infinite in both are equal."""
    gap = torch.where(one == two, 0.0, (one - two).abs())
    scale = one[torch.isfinite(one)].abs().amax().clamp(min=1e-30) if one.numel() else 1.0
    return float((gap / scale).amax()) if gap.numel() else 0.0

"""Checks of runs that train a model of transformers (`model=hf:FOLDER`): config.json, and isolation of documents."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.corpus import Corpus
from multipack.data.views.documents import IGNORE, Document
from multipack.models.decoder import Decoder
from multipack.models.foreign import PREFIX, check_documents, foreign_shape, open_foreign, read_config
from multipack.models.pretrained import CONFIG
from multipack.models.probe import isolation_probe
from multipack.models.probe_batch import packed_batch
from multipack.models.tiny_models import tiny_model
from multipack.ops.loss import linear_log_probabilities
from multipack.shapes import ModelShape, read_json, rotation_limit
from multipack.training.run_config import Config
from multipack.words import read_yaml

TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit, between transformers' forward pass and `Decoder`'s."""
FOREIGN_NOTES = [
    "the model's code is that of transformers: documents of a pack are isolated (probed on a tiny model of it);"
    " auxiliary losses of routers are not added; samples need an export"
]
"""Notes for the header of a run."""
_FREE = ("architecture", "vocabulary_size")


def check_shape(config: Config, where: str) -> None:
    """Check that the settings of the model agree with its config.json; `where` names it in the message."""
    own = foreign_shape(config.model.architecture).to_dict()
    values = config.shape_with(0).to_dict()
    if other := [name for name in own if name not in _FREE and own[name] != values[name]]:
        raise ValueError(
            f"model.{other[0]}={values[other[0]]} has no effect {where}: its config.json says {own[other[0]]};"
            " leave it out"
        )


def check_corpus(shape: ModelShape, corpus: Corpus) -> None:
    """Check that no document of a run changes others of its row by its length; a stream's are checked later."""
    limit = rotation_limit(read_config(shape.architecture))
    for documents in (corpus.train, corpus.validation):
        check_documents(documents.lengths, limit, shape.architecture)


def check_same_code(folder: str, checkpoint: Path) -> None:
    """Check that the folder in `model=hf:FOLDER` of a resumed run, if it is a new one, has the run's config.json."""
    saved = checkpoint / CONFIG
    before = read_yaml(checkpoint / "config.yaml").get("model", {}).get("architecture", "")
    if folder != before and saved.is_file() and read_json(Path(folder) / CONFIG) != read_json(saved):
        raise ValueError(
            f"model={PREFIX}{folder} has another config.json than the resumed run, whose weights depend on it: leave it"
            " out; the checkpoint has its own"
        )


def check_isolated(shape: ModelShape, device: torch.device, shares: bool = False) -> None:
    """Check the code of `shape.architecture` on a tiny model of it, with random weights, on this device.

    Its logits equal transformers' own forward pass, and documents in a pack do not change each other. With `shares`,
    documents that share tokens have the same log-probabilities as in a pack that repeats these tokens.

    Raises:
        ValueError: one of these does not hold; the message is the probe's reason.
    """
    where = f"model={PREFIX}{shape.architecture}"
    with tempfile.TemporaryDirectory() as folder:
        whole: Any = tiny_model(read_config(shape.architecture)).eval().to(device)
        with torch.no_grad():  # logits of a trained model's size, which soft caps would change
            whole.get_output_embeddings().weight.mul_(100.0)
        whole.save_pretrained(folder)
        small = foreign_shape(folder)
        with device:
            model = Decoder(small).eval()
        read = open_foreign(small)
        model.load_state_dict({name: read(name) for name, _ in model.named_parameters()})
    try:
        isolation_probe(model).check()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    tokens = list(range(4, 15))
    with torch.no_grad():
        expected = whole(torch.tensor([tokens], device=device), use_cache=False).logits[0]
        found = model.logits(packed_batch([tokens]).to(device))
    if not (found - expected).abs().max() <= TOLERANCE * expected.abs().max():
        raise ValueError(
            f"{where} is not supported: its logits are not the product of hidden states and the head's matrix"
        )
    if shares and not (distance := _shared_error(model, device)) <= TOLERANCE:
        raise ValueError(
            f"{where} cannot compute documents that share tokens (data.share_prefixes): log-probabilities of a tiny"
            f" model of it differ by {distance:.2g}; use data.share_prefixes=off"
        )


@torch.no_grad()
def _shared_error(model: Decoder, device: torch.device) -> float:
    """Largest relative change of log-probabilities where documents share tokens; infinite if the model raises."""
    begin, spans = list(range(4, 12)), np.array([[0, 11]])
    texts = [*begin, 12, 13, 14], [*begin, 15, 16, 4], [4, 5, 6, 7, 17, 18, 19, 20, 21, 22, 23]
    documents = [Document(np.array(text, dtype=np.uint16), spans) for text in texts]
    found = []
    for min_prefix in (None, 1):
        batch = PackedCollator(3, 11, min_prefix=min_prefix)(documents).to(device)
        try:
            hidden = model.hidden(batch)
        except (TypeError, ValueError, RuntimeError):
            return math.inf
        rows = None if batch.tree is None else batch.tree.target_slots
        given, cap = (hidden, model.output_weight, batch.targets), model.shape.logit_cap
        logs = linear_log_probabilities(*given, rows=rows, logit_cap=cap)
        found.append(logs[batch.targets != IGNORE])
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())

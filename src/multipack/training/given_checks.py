"""Checks of a user's settings: documents must be named, and a resumed run may not change some settings.

Settings of a resumed run are compared as values, whatever brought them (word, file, preset, another tool's name).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from multipack.shapes.adapter import AdapterConfig
from multipack.training.other_names import translate
from multipack.words import ConfigError, split

FIXED_AT_START = ("train.init_from", "preference.reference", "plan.packs_per_step", "plan.micro_batches")
"""Settings of a new run, which keep their saved values when `train.resume=auto` continues it."""

FIXED = ("plan.", "model.", "train.seed", "data.template_date", *FIXED_AT_START)
"""Settings, and beginnings of their names, that saved weights or the order of documents depend on.

Documents and tokenizer, which may move, are compared by their hashes when they are read."""

FREE = {
    # Which kernels compute, and where a model's code is read.
    *("model.attention", "model.kernels", "model.architecture"),
    "model.dropout",
    "model.scores",  # the objective sets it
}
"""Exceptions from `FIXED`."""


def check_documents_named(given: Mapping[str, Any], weights: str) -> None:
    """Check that somebody who brings weights, adapters or preferences also names documents.

    The default documents, Python's standard library, are for a first run; `data=stdlib` asks for them.

    Args:
        given: values of words and files by full name.
        weights: the weights to start from; empty = new ones.

    Raises:
        ConfigError: the documents are not named.
    """
    if "data" in given or any(key.startswith("data.") for key in given):
        return
    names = [key for key in given if key.startswith(("adapter", "preference"))]
    if weights or names:
        setting = f"train.init_from={weights}" if weights else f"{names[0]}={given[names[0]]}"
        raise ConfigError(
            f"{setting} comes without documents: name them, such as data=jsonl data.path=FILE (data=stdlib trains on"
            " Python's standard library)"
        )


def check_adapter_words(words: Iterable[str], adapter: AdapterConfig) -> None:
    """Raise a ConfigError that names a word on adapters if the run has none."""
    for word in words if adapter.name == "none" else ():
        if translate(*split(word))[0].startswith("adapter.") and not word.startswith("adapter.name"):
            raise ConfigError(f"{word} has no effect without adapters (adapter.name=none): set adapter=lora")


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a resumed run has the settings that its weights and its order of documents depend on.

    Args:
        before: full name of a setting → value in the saved run, which lacks settings that are newer.
        now: the same of the resumed run.

    Raises:
        ConfigError: a setting differs; the message names it.
    """
    for key, value in now.items():
        if key.startswith(FIXED) and key not in FREE and key in before and not _equal(before[key], value):
            raise ConfigError(
                f"{key} was {_text(before[key])} in that run and cannot become {_text(value)}: the saved weights and"
                " the order of documents depend on it; leave it out, or start a new run with another out="
            )


def check_adapter(before: AdapterConfig, now: AdapterConfig) -> None:
    """Check that a resumed run has the same adapters; raises a ConfigError that names what differs."""
    if differing := now.differing(before):
        raise ConfigError(
            f"adapter.{differing[0]} cannot change in a resumed run, whose adapters depend on it; leave it out, or"
            " start a new run with another out="
        )


def _equal(before: Any, now: Any) -> bool:
    """Whether values are equal; a file may hold text in place of a number, and a list in place of a tuple."""
    if isinstance(now, tuple | list):
        return isinstance(before, tuple | list) and list(before) == list(now)
    return bool(before == now) or str(before) == str(now)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"

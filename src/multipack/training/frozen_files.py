"""The files of frozen weights under adapters: a run saves a hash of them, and refuses others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

from multipack.atomic import cache_folder
from multipack.checksums import checksum, digest_of, remembered
from multipack.hub import model_folder
from multipack.models.peft_format import PEFT_CONFIG, PEFT_WEIGHTS, peft_base
from multipack.models.pretrained import CONFIG, weight_files
from multipack.parallel.world import World
from multipack.run import COMPLETE, is_export, is_peft, weights_folder
from multipack.shapes import read_json
from multipack.shapes.adapter import AdapterConfig

_RULE = "files-"
"""Prefix of hashes of whole files; earlier versions hashed samples of them, without a prefix."""
_PLACES = ("base_model_name_or_path", "revision")
"""Settings of an adapter that locate its base; not hashed, because the files of the base are."""

_MOST_SETTINGS = 5
"""Most files *config.json whose orders are tried; folders have up to four."""


def check_base(config: AdapterConfig, world: World) -> str:
    """Check that adapters have the frozen weights that they were trained with; collective.

    One process of each host reads the files, and only once while they stay the same.

    Returns:
        A hash of the whole files of weights and of the values of config.json.

    Raises:
        ValueError: the hash differs from `config.base_hash`, or hosts have different files.
    """
    found = problem = ""
    failure: Exception | None = None
    try:
        folder = weights_folder(model_folder(config.base, "adapter.base"))
        found = _hash_of(folder)
        by_samples = config.base_hash and not config.base_hash.startswith(_RULE)
        if config.base_hash not in ("", found, *(_sampled(folder) if by_samples else ())):
            empty = ", or give adapter.base_hash= if you know that they are the same" if by_samples else ""
            raise ValueError(
                f"adapter.base={config.base} holds other weights than these adapters were trained beside: restore"
                f" them, or name their folder in adapter.base{empty}"
            )
    except (ValueError, OSError) as error:
        problem, failure = str(error), error
    hosts = [json.loads(each) for each in world.gather(json.dumps([found, problem]))]
    if failure is not None:
        raise failure
    if other := [(rank, each) for rank, each in enumerate(hosts) if each != hosts[0]]:
        rank, (_, problem) = other[0]
        raise ValueError(
            problem or f"adapter.base={config.base} holds other weights on rank {rank} than on rank 0"
        )
    return found


def _hash_of(folder: Path) -> str:
    """A hash of the weights in a folder and of the values of its configuration."""
    if not is_export(folder):  # the last file of a checkpoint depends on all others
        return _RULE + checksum(folder / COMPLETE)
    files = [folder / PEFT_WEIGHTS] if is_peft(folder) else weight_files(folder)
    settings = read_json(folder / (PEFT_CONFIG if is_peft(folder) else CONFIG))
    decisive = {name: value for name, value in settings.items() if name not in _PLACES}
    sums = remembered(
        files,
        "weights",
        cache_folder(),
        lambda: json.dumps([[file.name, checksum(file)] for file in sorted(files)]),
    )
    below = _hash_of(peft_base(folder)) if is_peft(folder) else ""
    return _RULE + digest_of([json.dumps([below, sums, decisive], sort_keys=True).encode()]).hex()


def _sampled(folder: Path) -> Iterator[str]:
    """Hashes of earlier versions, of 256 samples of 16 KiB of each file, with JSON files in every order.

    Those versions hashed JSON files in the order in which the file system listed them.
    """
    files = sorted(folder.glob("*.safetensors")) if is_export(folder) else [folder / COMPLETE]
    weights = b"".join(map(_samples, files))
    settings = [_samples(file) for file in sorted(folder.glob("*config.json"))[:_MOST_SETTINGS]]
    for below in _sampled(peft_base(folder)) if is_peft(folder) else [""]:
        start = hashlib.sha256(below.encode() + weights)
        for order in permutations(settings):
            digest = start.copy()
            digest.update(b"".join(order))
            yield digest.hexdigest()


def _samples(file: Path) -> bytes:
    """The name and size of a file, and 256 samples of it."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        starts = (number * max(size - (1 << 14), 0) // 255 for number in range(256))
        return f"{file.name} {size}".encode() + b"".join(
            opened.read(1 << 14) for start in starts if opened.seek(start) >= 0
        )

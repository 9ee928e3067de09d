"""The files of frozen weights under adapters: a run saves a hash of them, and refuses others."""

from __future__ import annotations

import json
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
"""Prefix of hashes of whole files. Hashes of earlier versions, of samples of them, have none and are not compared."""
_PLACES = ("base_model_name_or_path", "revision")
"""Settings of an adapter that locate its base; not hashed, because the files of the base are."""


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
        if config.base_hash.startswith(_RULE) and config.base_hash != found:
            raise ValueError(
                f"adapter.base={config.base} holds other weights than these adapters were trained beside: restore"
                " them, or name their folder in adapter.base"
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

"""Local folders of models: from a path, a name on the Hugging Face hub, or a GGUF file.

    NAME[@REV]   a folder of that name ─ else ─▶ the local cache (HF_HOME) ─ else ─▶ download into the cache
    FILE.gguf    transformers reads and dequantizes it ─▶ a folder in multipack's cache, once for its content

Only settings, tokenizers and weights in safetensors are fetched, never code or pickled files.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from multipack.atomic import atomic_folder, cache_folder, locked
from multipack.checksums import checksum, remembered
from multipack.machine import import_extra
from multipack.untrusted import foreign_errors, from_folder

PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
"""Files that are fetched, outside of subfolders."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")

_SNAPSHOT = re.compile(r".*/models--([\w.-]+)/snapshots/(\w+)")
"""A folder in the cache of the hub: the name with `--` for `/`, and the revision."""


def model_folder(name: str, setting: str) -> Path:
    """The local folder of a path, of a model on the hub, or of the model in a GGUF file.

    Args:
        name: a path, or a name such as `gpt2` or `Qwen/Qwen3-0.6B`, with `@` and a revision; an existing path comes
            first.
        setting: the setting that holds the name, for messages.

    Returns:
        The path, even if it does not exist and cannot be a name; or a folder in a cache.

    Raises:
        FileNotFoundError: the model is neither a path, nor whole in the cache, nor can it be downloaded.
        ImportError: huggingface_hub, or for a GGUF file gguf or transformers, is not installed.
        ValueError: transformers does not read the GGUF file.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _dequantized(path, f"{setting}={name}")
    if path.suffix == ".gguf" and not path.exists():
        raise FileNotFoundError(f"{setting}={name}: there is no such file")
    if not is_name(name):
        return path
    hub = import_extra("huggingface_hub", f"{setting}={name}", "train")
    repository, _, revision = name.partition("@")
    options = {"allow_patterns": PATTERNS, "ignore_patterns": ["*/*"], "revision": revision or None}
    try:
        found = Path(hub.snapshot_download(repository, local_files_only=True, **options))
        if _is_whole(found):
            return found
    except (OSError, ValueError):  # not in the cache
        pass
    try:
        found = Path(hub.snapshot_download(repository, **options))
        reason = "" if _is_whole(found) else "it has no config.json with weights in safetensors"
    except Exception as error:  # of huggingface_hub, of its HTTP library, or of the file system
        reason = _reason(error)
    if not reason:
        return found
    from huggingface_hub import constants

    raise FileNotFoundError(
        f"{setting}={name} is no folder here, not whole in the cache of the hub ({constants.HF_HUB_CACHE}), and cannot"
        f" be downloaded ({reason}): check the name and the network, or give a folder"
    )


def hub_name(model: str) -> tuple[str, str]:
    """Name and revision on the hub of NAME@REV or of a folder in the cache; else `model` and an empty revision."""
    if found := _SNAPSHOT.fullmatch(model):
        return found[1].replace("--", "/"), found[2]
    name, _, revision = model.partition("@")
    return (name, revision) if revision and is_name(model) else (model, "")


def is_name(model: str) -> bool:
    """Whether `model_folder` looks for a model on the hub and not in a folder."""
    return bool(_NAME.fullmatch(model)) and not Path(model).exists() and not model.endswith(".gguf")


def lasting_name(folder: Path) -> str:
    """NAME@REV of a folder in the cache of the hub, which is valid on every machine; else the folder's path."""
    name, revision = hub_name(str(folder))
    if revision:
        from huggingface_hub import constants

        if Path(constants.HF_HUB_CACHE).resolve() in folder.resolve().parents:
            return f"{name}@{revision}"
    return str(folder)


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot has settings and all its weights."""
    index = folder / "model.safetensors.index.json"
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return False
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    files = set(json.loads(index.read_text())["weight_map"].values())
    return all((folder / file).is_file() for file in files)


def _reason(error: Exception) -> str:
    """Why a download failed, in a few words."""
    name = type(error).__name__
    if name in ("RepositoryNotFoundError", "GatedRepoError"):
        return "the hub has no such model, or wants a login: `hf auth login`"
    if name in ("OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "ConnectionError"):
        return "no network"
    return f"{name}: {' '.join(str(error).split())[:120]}"


def _dequantized(file: Path, where: str) -> Path:
    """The folder of the model in a GGUF file, in float32; `where` is for messages."""
    content = remembered([file], "gguf", cache_folder(), lambda: checksum(file))
    folder = cache_folder() / "gguf" / hashlib.sha256(f"2 {content}".encode()).hexdigest()[:32]
    with locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            import_extra("gguf", where, "gguf")
            library = import_extra("transformers", where, "gguf")
            library.logging.set_verbosity_error()
            library.logging.disable_progress_bar()
            given = {"gguf_file": file.name, "local_files_only": True}
            weights: dict[str, Any] = {"dtype": "float32", "output_loading_info": True}
            weights["attn_implementation"] = "eager"  # only read, and not what the file may name
            if hasattr(library, "GgufConfig"):  # others always dequantize
                weights["quantization_config"] = library.GgufConfig(dequantize=True)
            with foreign_errors(f"{where}: transformers reads no model from it"):
                model, report = from_folder(library.AutoModelForCausalLM, file.parent, **given, **weights)
                tokenizer = from_folder(library.AutoTokenizer, file.parent, **given)
            if missing := sorted(report["missing_keys"]):
                raise ValueError(f"{where}: the file lacks {missing[0]} ({len(missing)} tensors in all)")
            with atomic_folder(folder) as partial:
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
    return folder

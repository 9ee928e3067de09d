"""Device, versions and tools; fails in one line if the checks cannot run here.

Beside torch the checks need numpy, numba, scipy, tokenizers, safetensors, jinja2, omegaconf, typer and rich.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import sys

NEEDED = ("numpy", "numba", "scipy", "torch", "tokenizers", "safetensors", "jinja2", "omegaconf")
NEEDED += ("typer", "rich", "pytest", "hypothesis")
OPTIONAL = ("triton", "flash-attn-3", "xformers")


def version_of(package: str) -> str | None:
    """Version of an installed package; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    versions = {package: version_of(package) for package in NEEDED + OPTIONAL}
    if missing := [package for package in NEEDED if versions[package] is None]:
        sys.exit(f"missing: {', '.join(missing)} (python -m pip install --target DIR, then PYTHONPATH=DIR)")
    for package in ("numba", "multipack"):  # numba is built for some versions of numpy only
        try:
            importlib.import_module(package)
        except ImportError as error:
            sys.exit(f"{package} cannot be imported: {error}")
    import torch

    from gpu_parts.common import options_of, write_part

    options = options_of(__doc__)
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < (2, 11):
        sys.exit(f"torch {torch.__version__} is older than 2.11")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU: --device cpu --small shows that the parts run")
    figures = {"versions": versions, "cuda": torch.version.cuda, "gcc": shutil.which("gcc")}
    if options.device == "cuda":
        found = torch.cuda.get_device_properties(0)
        figures |= {
            "memory_gib": found.total_memory / 2**30,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    if figures["gcc"] is None:
        print("no gcc: torch.compile and flex attention cannot build their kernels' launchers")
    print("\n".join(f"{name}: {value}" for name, value in (figures | versions).items() if name != "versions"))
    write_part(options, figures)


if __name__ == "__main__":
    main()

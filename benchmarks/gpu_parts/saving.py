"""The file of a checkpoint, 4 GiB of the device's tensors: seconds to write it, and the share that its checksum adds.

The checksum is computed by other threads while the file is written. Files with and without it are written by turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch

from gpu_parts.common import options_of, write_part
from multipack.training import checkpoint_tensors
from planning_tables.table import Asked


def seconds_of(file: Path, tensors: dict[str, torch.Tensor]) -> float:
    """Seconds to write a file; it is removed."""
    began = time.perf_counter()
    checkpoint_tensors.save_safetensors(file, tensors, {"format": "pt"})
    seconds = time.perf_counter() - began
    file.unlink()
    return seconds


def main() -> None:
    options = options_of(__doc__)
    elements, repeats = (2**10, 1) if options.small else (2**24, 5)
    tensors = {str(number): torch.randn(elements, device=options.device) for number in range(64)}
    hashed, plain = [], []
    with tempfile.TemporaryDirectory(dir=options.out.parent) as folder:  # on a disk, not in memory
        file = Path(folder) / "weights.safetensors"
        seconds_of(file, tensors)
        for _ in range(repeats):
            hashed.append(seconds_of(file, tensors))
            with patch.object(checkpoint_tensors, "digest_of", lambda parts: b""):
                plain.append(seconds_of(file, tensors))
    share = 1.0 - statistics.median(plain) / statistics.median(hashed)
    figures = {"gib": 64 * elements * 4 / 2**30, "seconds": hashed, "seconds_without_checksum": plain}
    print({**figures, "share": share})
    asked = Asked("checksum, share of a save", share, 0.02, at_most=True, format=".3f")
    write_part(options, {**figures, "share": share}, [] if options.small else [asked])


if __name__ == "__main__":
    main()

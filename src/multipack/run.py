"""What a run directory holds. Training writes it; reports, resume and generation read it.

    RUN/
      config.yaml       the resolved configuration; `multipack train config=RUN/config.yaml` starts such a run anew
      metrics.jsonl     a record a step and evaluation, full precision
      samples.txt       what the model wrote at evaluations
      cost.json         what documents cost, where it was measured; trace.json where train.profile asked for one
      checkpoints/
        latest          the name of the newest complete checkpoint
        best            the name of the one with the lowest validation loss
        step-00000100/  {model,optimizer,observers,rng}.safetensors state.json config.yaml tokenizer.json, and
                        chat_template.json of chats, cost.json; observers only where one keeps tensors. A group that
                        ranks divide is a folder, shard-0000N.safetensors and index.json; .complete is written last

Files whose names begin with a dot are being written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multipack.atomic import is_free, write_atomically


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run, and the few ways in which they come to be."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON record a line."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Generated text."""
        return self.path / "samples.txt"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def latest(self) -> Path:
        """File that names the newest complete checkpoint."""
        return self.checkpoints / "latest"

    @property
    def best(self) -> Path:
        """File that names the complete checkpoint with the lowest validation loss."""
        return self.checkpoints / "best"

    @classmethod
    def at(cls, path: str | Path) -> RunDirectory:
        """The run directory at `path`, which need not exist."""
        return cls(Path(path))

    def check_free(self) -> None:
        """Refuse a directory that holds something already.

        Raises:
            FileExistsError: the message says how to go on.
        """
        if not is_free(self.path, leftovers=True):
            raise FileExistsError(
                f"{self.path} exists and is not empty. Continue that run with `train.resume=true out={self.path}`,"
                " or choose another out="
            )

    def point_to(self, checkpoint: Path, pointer: Path | None = None) -> None:
        """Let `latest` (or `best`) name `checkpoint`: a run that resumes from an older one abandons what came after."""
        write_atomically(pointer or self.latest, f"{checkpoint.name}\n".encode())

    def create(self, config_yaml: str) -> None:
        """Make the directory for a new run; see `check_free`."""
        self.check_free()
        # The configuration comes first: a process killed here leaves nothing that has a name, or a run.
        write_atomically(self.config, config_yaml.encode())
        self.checkpoints.mkdir(exist_ok=True)

    def latest_checkpoint(self) -> Path:
        """The folder of the newest complete checkpoint.

        Raises:
            FileNotFoundError: this is no run directory, or it has no checkpoint so far.
        """
        if not self.config.is_file():
            raise FileNotFoundError(f"{self.path} is not a run directory: it has no config.yaml")
        if not self.latest.is_file():
            raise FileNotFoundError(
                f"{self.path} has no complete checkpoint; start the run anew with another out="
            )
        return self.checkpoints / self.latest.read_text(encoding="utf-8").strip()

    def best_checkpoint(self) -> Path:
        """The folder of the checkpoint with the lowest validation loss.

        Raises:
            FileNotFoundError: none is known: the run never evaluated, or the checkpoint is gone.
        """
        name = self.best.read_text(encoding="utf-8").strip() if self.best.is_file() else ""
        if not name or not (self.checkpoints / name).is_dir():
            raise FileNotFoundError(
                f"{self.path} has no best checkpoint: it was never evaluated (train.eval_every), or the checkpoint"
                " is gone; take the latest"
            )
        return self.checkpoints / name

    def records(self) -> Iterator[dict[str, Any]]:
        """The records of metrics.jsonl in order; a last line that was cut short is left out."""
        if not self.metrics.exists():
            return
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def config_yaml(config: Any) -> str:
    """A configuration (any dataclass of dataclasses) as the YAML that `config=FILE` reads back."""
    from omegaconf import OmegaConf  # only where a configuration is written or read

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def find_run(path: str | Path) -> tuple[RunDirectory, Path | None]:
    """A run directory, or one of its checkpoints, from a path that the user gave.

    Returns:
        (run, checkpoint): checkpoint is None when the path names the run itself.

    Raises:
        FileNotFoundError: the path is neither.
    """
    given = Path(path)
    if (given / "state.json").is_file() and given.parent.name == "checkpoints":
        return RunDirectory(given.parent.parent), given
    if (given / "config.yaml").is_file():
        return RunDirectory(given), None
    raise FileNotFoundError(
        f"{given} is neither a run directory (config.yaml) nor one of its checkpoints (state.json)"
    )


def is_export(path: Path) -> bool:
    """Whether `path` is a folder in Hugging Face's format rather than a run or a checkpoint."""
    return (path / "config.json").is_file() and not (path / "config.yaml").is_file()


def weights_folder(path: Path) -> Path:
    """The folder that weights are read from: an export, a checkpoint, or the latest checkpoint of a run.

    Raises:
        FileNotFoundError: `path` is none of these, or the run has no complete checkpoint.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: give a run, a checkpoint, or a Hugging Face folder")
    if is_export(path):
        return path
    run, named = find_run(path)
    return named or run.latest_checkpoint()

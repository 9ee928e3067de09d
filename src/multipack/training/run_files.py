"""The files of a run: its directory, its log, and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from multipack.atomic import write_atomically
from multipack.checksums import checksum
from multipack.data.text.skipped import counted
from multipack.data.text.texts import CHAT_TEMPLATE
from multipack.data.views.corpus import Corpus
from multipack.parallel.state import State
from multipack.parallel.world import World
from multipack.run import RunDirectory, config_yaml
from multipack.training.checkpoint import Checkpoint, CheckpointWriter, damage, name_of, sweep
from multipack.training.run_config import Config
from multipack.training.run_log import RunLog


class RunFiles:
    """Writes the files of a run; `source` holds the small files of the model that it starts with.

    Attributes:
        log: records and samples; on rank 0 only, after `open`.
    """

    def __init__(
        self,
        run: RunDirectory,
        world: World,
        config: Config,
        corpus: Corpus,
        chat_template: str,
        source: Mapping[str, str] = MappingProxyType({}),
        report: Callable[[str], None] = print,
    ) -> None:
        self.run, self._world, self._config, self._report = run, world, config, report
        self.log: RunLog | None = None
        # With this configuration the same run can be started again, in another directory.
        again = replace(config.train, resume="false")
        self._texts = {
            "config.yaml": config_yaml(replace(config, train=again, out="")),
            "tokenizer.json": corpus.tokenizer.to_json(),
            **source,
            **({CHAT_TEMPLATE: chat_template} if chat_template else {}),
        }
        documents = corpus.arriving or corpus.train
        hashes = {"documents": documents.fingerprint, "tokens": corpus.tokenizer.hash}
        if corpus.validation_files:  # others are determined by the training documents
            hashes["validation documents"] = corpus.validation.fingerprint
        self._origin: dict[str, Any] = {
            "corpus": hashes,
            "world_size": world.size,
            "threads": torch.get_num_threads(),
            "files": {},
        }
        train = config.train
        self._writer = CheckpointWriter(run, world, train.keep_checkpoints, train.checkpoint_async, report)

    def check_origin(self, progress: Mapping[str, Any]) -> list[str]:
        """Check that a checkpoint was written with the same documents and tokenizer.

        Returns:
            Notes for the header of the run.

        Raises:
            ValueError: documents or tokenizer differ, or a file of the run is missing or damaged.
        """
        self._origin["files"] = progress["files"]
        if problem := damage(self.run.path, progress["files"], checked=progress["files"]):
            raise ValueError(
                f"{self.run.path}: {problem}; restore it from a copy of the run, or start a new run with another out="
            )
        for what, digest in self._origin["corpus"].items():
            saved = str(progress["corpus"].get(what))
            if saved != digest:
                raise ValueError(
                    f"the run was trained with other {what} (hash {saved[:12]}, now {digest[:12]});"
                    " continue with the same ones, or start a new run with another out="
                )
        processes, threads = progress["world_size"], progress["threads"]
        if (processes, threads) == (self._origin["world_size"], self._origin["threads"]):
            return []
        return [
            f"the checkpoint was written by {counted(processes, 'processes')} with {counted(threads, 'threads')}:"
            " the same documents follow, but sums round differently"
        ]

    def open(self, files: Mapping[str, bytes], resumed: Checkpoint | None, best_step: int) -> None:
        """Create the run directory with `files`, or truncate its log to the checkpoint's; called on rank 0.

        Checkpoints keep the checksums of `files`; only a run without a checkpoint writes them.

        Raises:
            FileExistsError: a new run's directory is not empty.
            ValueError: another process writes to it, or the log does not begin with the checkpoint's log.
        """
        run, config, is_new = self.run, self._texts["config.yaml"], self._config.train.resume == "false"
        if is_new:
            run.create(config)
        self.log = RunLog(run)  # from here on no other process writes to the run
        if not is_new:
            cut = self.log.cut(resumed.progress["marks"] if resumed else None)
            write_atomically(run.config, config.encode())
            if cut and resumed is None:
                self._report(
                    f"note: there is no checkpoint, so the run begins again with step 1; {cut:,} records move to"
                    f" {run.metrics.name}.cut"
                )
        if problem := sweep(run):
            self._report(f"note: {problem}")
        if resumed is None:
            for name, content in files.items():
                write_atomically(run.path / name, content)
            self._origin["files"] = {name: checksum(run.path / name) for name in files}
            return
        run.point_to(resumed.path)
        best = run.checkpoints / name_of(best_step)
        if best.is_dir():
            run.point_to(best, run.best)
        elif best_step >= 0:  # `best` names a checkpoint after the resumed one
            run.best.unlink(missing_ok=True)

    def save(
        self, step: int, tensors: State, progress: Callable[[], dict[str, Any]], *, best: bool, last: bool
    ) -> None:
        """Write a checkpoint; collective. With `train.checkpoint_async` in the background, except the last one.

        `progress` returns the progress of the trainer as plain values; it is called on rank 0.

        Raises:
            ValueError: this checkpoint, or the previous one in the background, could not be written.
        """
        values = dict(self._origin)

        def add_progress() -> None:
            assert self.log is not None
            values.update(progress(), marks=self.log.marks())

        self._world.on_main(add_progress)
        self._writer.save(step, tensors, values, self._texts, best)
        if last:
            self._writer.wait()

    def close(self, failed: bool) -> str:
        """Wait for a checkpoint in the background and close the log.

        Returns:
            After a failure, when other ranks may be gone: why that checkpoint could not be written; otherwise empty.

        Raises:
            ValueError: on every rank, without a failure: that checkpoint could not be written.
        """
        try:
            if failed:
                return self._writer.finish_alone()
            self._writer.wait()
            return ""
        finally:
            if self.log is not None:
                self.log.close()

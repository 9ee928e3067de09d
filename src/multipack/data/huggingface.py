"""Records in a data set of Hugging Face's library `datasets`.

    data.source=huggingface data.path=FOLDER                           what `save_to_disk` wrote
    data.source=huggingface data.path=NAME data.subset=… data.part=…   `load_dataset(NAME, subset, split=part)`

Needs the extra `huggingface`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multipack.data.data_config import DataConfig
from multipack.data.messages import without_nulls
from multipack.data.record_source import RecordSource, Row
from multipack.data.tokenizer import TokenizerConfig


def open_dataset(config: DataConfig) -> Any:
    """The data set that `config` names: a `datasets.Dataset`, or with `data.stream` an `IterableDataset`.

    Raises:
        ImportError: the package datasets is not installed.
        ValueError: there is no such data set, subset or part.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            'data.source=huggingface needs the package datasets: pip install "multipack[huggingface]"'
        ) from error
    folder = Path(config.path).expanduser()
    is_saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        if not is_saved:
            path = str(folder) if folder.exists() else config.path
            return datasets.load_dataset(
                path, config.subset or None, split=config.part, streaming=config.stream
            )
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library and those below it raise errors of many kinds
        wanted = f"data.path={config.path}, data.subset={config.subset!r}, data.part={config.part!r}"
        raise ValueError(f"{wanted}: {type(error).__name__}: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if config.part not in loaded:
            raise ValueError(
                f"data.part={config.part!r}: {config.path} has the parts {', '.join(map(str, loaded))}"
            )
        loaded = loaded[config.part]
    elif config.part != "train":
        raise ValueError(f"data.part={config.part!r}: {config.path} has no parts; leave data.part out")
    if config.subset:
        raise ValueError(
            f"data.subset={config.subset!r}: {config.path} was saved as one set; leave data.subset out"
        )
    return loaded.to_iterable_dataset() if config.stream else loaded


def records_of_dataset(dataset: Any) -> Iterator[dict[str, Any]]:
    """The rows of a `datasets.Dataset` or `IterableDataset`, or of anything that yields records.

    Fields that a nested object does not have, which such tables hold as None, are left out.
    """
    for record in dataset:
        yield without_nulls(dict(record))


class HuggingFaceSource(RecordSource):
    """The rows of a data set; only the columns that are used are read."""

    unit = "rows"

    def __init__(self, config: DataConfig, tokenizer: TokenizerConfig | None = None) -> None:
        super().__init__(config, tokenizer)
        if config.stream:
            raise ValueError(
                "data.stream=true is for training while records arrive; leave it out to prepare a store"
            )
        self._dataset = open_dataset(config)
        self.total, self._done = len(self._dataset), 0

    @property
    def done(self) -> int:
        """See `Source`."""
        return self._done

    def _before(self) -> None:
        super()._before()
        self._done = 0

    def _rows(self) -> Iterator[Row]:
        columns = self._reader.columns(self._dataset.column_names)
        for number, record in enumerate(records_of_dataset(self._dataset.select_columns(columns)), 1):
            self._done = number
            yield Row(f"{self._place}:{number}", f"{self.config.path}, row {number}", record)

    def _content_hash(self) -> str:
        """From the library's fingerprint, which changes with the rows and with whatever was done to them."""
        known = {"fingerprint": self._dataset._fingerprint, "rows": self.total, "part": self.config.part}
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    @property
    def _place(self) -> str:
        return (
            Path(self.config.path).name if Path(self.config.path).expanduser().exists() else self.config.path
        )

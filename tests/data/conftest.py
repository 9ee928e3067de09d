"""What the tests of data/ share: small stores and configurations whose cache is the test's own."""

from pathlib import Path

import pytest

from multipack.data.stores import writer as writer_module
from multipack.data.stores.shards import StoreHeader
from multipack.data.stores.store import TokenStore
from multipack.data.stores.writer import SHARD_TOKENS, Encoded, StoreWriter, shard_of
from multipack.data.text.data_config import DataConfig
from multipack.data.text.tokenizer import byte_tokenizer
from multipack.data.views.documents import Documents


@pytest.fixture
def config(tmp_path):
    """Makes a DataConfig with a cache in the test's folder."""

    def make(**fields):
        return DataConfig(**{"cache": str(tmp_path / "cache"), **fields})

    return make


@pytest.fixture(scope="session")
def content():
    """Name, tokens and ranges of targets of each document of a store."""

    def read(store):
        numbers = range(store.num_documents)
        return [(store.name(n), store.tokens_of(n).tolist(), store.spans_of(n).tolist()) for n in numbers]

    return read


@pytest.fixture
def write_store(tmp_path, monkeypatch):
    """Writes a store of bytes: documents are lists of (length, is_target) parts, tokens count up from 0."""

    def write(documents, name="small.store", shard_tokens=SHARD_TOKENS, **options):
        path = tmp_path / name
        token = 0
        monkeypatch.setattr(writer_module, "SHARD_TOKENS", shard_tokens)
        with StoreWriter(path, byte_tokenizer(), **options) as writer:
            for number, parts in enumerate(documents):
                made = []
                for length, is_target in parts:
                    made.append(([(token + i) % 256 for i in range(length)], is_target))
                    token += length
                writer.add(f"doc{number}", made)
        return TokenStore(path)

    return write


@pytest.fixture(scope="session")
def memory_store():
    """Makes a store in memory of documents that are lists of (bytes, is_target) parts."""

    def make(documents):
        made = [Encoded(f"doc{number}", parts) for number, parts in enumerate(documents)]
        header = StoreHeader(257, "byte", byte_tokenizer().hash)
        return TokenStore(Path("memory"), header=header, shards=[shard_of(made, 257)])

    return make


@pytest.fixture
def write_pairs(tmp_path, monkeypatch):
    """Writes a store of preference pairs: (prompt, chosen, rejected) lengths; tokens count up from 0."""

    def write(pairs, name="pairs", shard_tokens=SHARD_TOKENS):
        monkeypatch.setattr(writer_module, "SHARD_TOKENS", shard_tokens)
        with StoreWriter(tmp_path / name, byte_tokenizer(), pairs=True) as writer:
            for number, (prompt, *answers) in enumerate(pairs):
                for answer in answers:
                    tokens = list(range(prompt + answer))
                    writer.add(f"pair{number}", [(tokens[:prompt], False), (tokens[prompt:], True)])
        return TokenStore(tmp_path / name)

    return write


@pytest.fixture
def small(write_store):
    """Three documents: 12 tokens after a prompt of 3, 4 tokens, 8 tokens with two ranges of targets."""
    return Documents.whole(
        write_store([[(3, False), (9, True)], [(4, True)], [(1, False), (2, True), (1, False), (4, True)]])
    )


@pytest.fixture
def text_file(tmp_path):
    """Writes a text file and returns its path as configurations take it."""

    def write(text, name="text.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write

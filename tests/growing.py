"""Token stores that grow shard by shard, and records that can save their state, for tests of streams."""

from multipack.data.stores.writer import StoreWriter
from multipack.data.text.tokenizer import byte_tokenizer


def write_shard(path, documents, **options):
    """Write the next shard of a store: (name, parts) of each document."""
    writer = StoreWriter(
        path, byte_tokenizer(), **options
    ).__enter__()  # continues after the shards that are there
    for name, parts in documents:
        writer.add(name, parts)
    writer.end_shard()


def complete(path):
    """End a store with an empty shard."""
    with StoreWriter(path, byte_tokenizer()):
        pass


def reopen(path):
    """Remove the shard that `complete` adds to three others."""
    (path / "shard-0000-00003.safetensors").unlink()


class Rows:
    """Records that continue where they stand, as streamed data sets do; `taken` counts how many were read."""

    def __init__(self, rows):
        self.rows, self.next, self.taken = rows, 0, 0

    def __iter__(self):
        while self.next < len(self.rows):
            self.taken, self.next = self.taken + 1, self.next + 1
            yield self.rows[self.next - 1]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]

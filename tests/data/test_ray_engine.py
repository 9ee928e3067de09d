"""`prepare --engine ray`: the parts of a source as tasks; the documents are those of one machine."""

import json
import sys
from types import SimpleNamespace

import pytest

from multipack.data.stores import ray_engine
from multipack.data.stores.prepare import prepare
from multipack.data.stores.store import TokenStore
from multipack.data.text.tokenizer import TokenizerConfig

BPE, CHAR = TokenizerConfig("bpe", "", 300), TokenizerConfig("char")


class HereRay(SimpleNamespace):
    """What `run_parts` uses of Ray, with all tasks in this process."""

    exceptions = SimpleNamespace(WorkerCrashedError=ZeroDivisionError, OutOfMemoryError=MemoryError)

    def __init__(self):
        super().__init__(calls=0, canceled=0)

    def is_initialized(self):
        return True

    def put(self, value):
        return value

    def remote(self, **_):
        return lambda function: SimpleNamespace(remote=lambda *given: self._run(function, given))

    def _run(self, function, given):
        self.calls += 1
        return function(*given)

    def wait(self, tasks):
        return tasks[:1], tasks[1:]

    def get(self, tasks):
        return tasks

    def cancel(self, task, force):
        self.canceled += 1


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Tasks run in this process, in its working directory."""
    made = HereRay()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setattr(ray_engine, "PART_BYTES", 300)
    return made


@pytest.fixture
def folder(tmp_path):
    """Six files of records."""
    path = tmp_path / "records"
    path.mkdir()
    for number in range(6):
        lines = [
            json.dumps({"prompt": f"Q{number} {line} é", "completion": "w " * (line % 5)})
            for line in range(9)
        ]
        (path / f"{number}.jsonl").write_text("\n".join(lines))
    return str(path)


def check(config, folder, tmp_path, content):
    data = config(source="jsonl", path=folder)
    whole = TokenStore(prepare(data, BPE, tmp_path / "whole"))
    calls = []
    store = TokenStore(prepare(data, BPE, tmp_path / "ray", lambda *call: calls.append(call), engine="ray"))
    assert content(store) == content(whole)
    assert (store.noted.skipped, store.description) == (
        whole.noted.skipped,
        whole.description,
    )
    assert store.header.key == whole.header.key
    assert len(store.shards) == store.header.parts == calls[-1][0] == calls[-1][1] > 3
    assert prepare(data, BPE, tmp_path / "ray", engine="ray") == tmp_path / "ray"  # and is reused


def test_parts_are_tasks(here, config, folder, tmp_path, content):
    check(config, folder, tmp_path, content)
    assert 3 < here.calls <= 6


def test_bad_input_is_one_line(here, config, folder, tmp_path):
    (tmp_path / "records" / "3.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"3\.jsonl, line 1: not JSON"):
        prepare(config(source="jsonl", path=folder), TokenizerConfig("byte"), tmp_path / "ray", engine="ray")
    assert not TokenStore(tmp_path / "ray", growing=True).is_complete
    assert here.canceled > 0  # the other parts stop
    with pytest.raises(ValueError, match=r"data\.dedup=true"):
        prepare(config(source="jsonl", path=folder, dedup=True), CHAR, tmp_path / "ray", engine="ray")


@pytest.mark.slow
def test_on_a_cluster(config, folder, tmp_path, monkeypatch, content):
    ray = pytest.importorskip("ray", reason='needs `pip install "multipack[ray]"`')
    monkeypatch.setattr(ray_engine, "PART_BYTES", 300)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        check(config, folder, tmp_path, content)
        assert ray.is_initialized()  # the cluster of the caller stays connected
    finally:
        ray.shutdown()


def test_without_ray_the_extra_is_named(config, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install .*\[ray\]"):
        prepare(config(source="text", path=text_file("abc")), CHAR, tmp_path / "out", engine="ray")

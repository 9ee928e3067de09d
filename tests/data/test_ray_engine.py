import json

import pytest

from multipack.data import batches
from multipack.data.prepare import prepare
from multipack.data.tokenizer import TokenizerConfig

BPE, CHAR = TokenizerConfig("bpe", "", 300), TokenizerConfig("char")


def content(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_ray_gives_what_this_machine_gives(config, text_file, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason='needs `pip install "multipack[ray]"`')
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 9)
    lines = [
        json.dumps({"prompt": f"Q{n} é", "completion": "" if n % 40 == 7 else "word " * (n % 23 + 1)})
        for n in [number % 150 for number in range(200)]
    ]
    pairs = text_file("\n".join(lines), "pairs.jsonl")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="warning")
    try:
        for dedup, shards in ((False, 0), (True, 0), (True, 3)):
            data = config(source="jsonl", path=pairs, dedup=dedup)
            name = f"{dedup}{shards}"
            local = prepare(data, BPE, tmp_path / f"local{name}", shards=shards)
            on_ray = prepare(data, BPE, tmp_path / f"ray{name}", shards=shards, engine="ray")
            assert content(on_ray) == content(local)
        prepare(config(source="text", path=text_file("abc")), CHAR, tmp_path / "abc")
        other = config(
            source="text", path=text_file("ab\n\nax", "other.txt"), documents="blank_line", workers=2
        )
        file = TokenizerConfig("file", str(tmp_path / "abc" / "tokenizer.json"))
        with pytest.raises(ValueError, match=r"^other\.txt:3: .* does not know 'x'"):
            prepare(other, file, tmp_path / "out", engine="ray")
        assert not (tmp_path / "out").exists()
        assert ray.is_initialized()  # whoever connected it goes on with it
    finally:
        ray.shutdown()


def test_without_ray_the_extra_is_named(config, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ValueError, match=r'pip install "multipack\[ray\]"'):
        prepare(config(source="text", path=text_file("abc")), CHAR, tmp_path / "out", engine="ray")
    assert list(tmp_path.glob("*out*")) == []

"""Documents that arrive during training: growing stores and streamed records, validation, waiting, resuming."""

import itertools
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from growing import Rows, complete, reopen, write_shard
from multipack.data.text.tokenizer import TokenizerConfig
from multipack.data.views import arriving as room
from multipack.data.views.arriving import HEAD, GrowingFolder, StreamedRecords
from multipack.data.views.corpus import Corpus, load_corpus
from multipack.data.views.overlong import FitReport
from multipack.training.run_report import corpus_notes

LENGTHS = np.random.default_rng(3).integers(2, 40, 60)


def shown(arriving, items):
    documents = [arriving.document(item) for item in items]
    return [(i["name"], d.tokens.tolist(), d.spans.tolist()) for i, d in zip(items, documents, strict=True)]


def validation_names(arriving):
    return [arriving.validation.name(number) for number in range(len(arriving.validation))]


# --- growing stores -----------------------------------------------------------------------------------


def write(path, number, lengths, **options):
    """Write shard `number` of documents of these lengths."""
    documents = []
    for document, length in enumerate(lengths):
        tokens = [(60 * number + document + i) % 3 for i in range(length)]
        documents.append((f"doc{number}.{document}", [(tokens[:1], False), (tokens[1:], True)]))
    write_shard(path, documents, **options)


@pytest.fixture
def folder(tmp_path):
    """A complete store with three shards of 20 documents."""
    path = tmp_path / "shards"
    for number in range(3):
        write(path, number, LENGTHS[20 * number : 20 * number + 20])
    complete(path)
    return path


@pytest.fixture
def follow(config):
    def make(path, limit=64, **fields):
        usual = {"validation": 0.0, "patience_seconds": 60.0}
        return GrowingFolder(config(source="store", path=str(path), stream=True, **usual | fields), limit)

    return make


def test_all_documents_of_a_store_arrive_in_order(folder, follow, monkeypatch):
    monkeypatch.setattr(room, "OPEN_SHARDS", 1)  # others are opened again
    arriving = follow(folder)
    items = list(arriving)
    assert [item["length"] for item in items] == LENGTHS.tolist()
    assert [item["targets"] for item in items] == (LENGTHS - 1).tolist()
    assert items[20]["name"] == "shard 1: doc1.0"
    assert [len(arriving.document(item).tokens) for item in items] == LENGTHS.tolist()
    assert list(arriving) == []  # it stands at the end
    arriving.restart()
    assert list(arriving) == items


def test_a_growing_store_gives_the_documents_of_a_complete_one(folder, follow, tmp_path):
    path = tmp_path / "growing"

    def grow():
        for number in range(3):
            time.sleep(0.05)
            write(path, number, LENGTHS[20 * number : 20 * number + 20])
        time.sleep(0.05)
        complete(path)

    thread = threading.Thread(target=grow)
    thread.start()
    growing = follow(path)  # before there is a folder
    items = list(growing)
    thread.join()
    whole = follow(folder)
    assert shown(growing, items) == shown(whole, list(whole))


@pytest.mark.parametrize("stop", [0, 1, 20, 21, 60])
def test_a_store_resumes_exactly(folder, follow, stop):
    options = {"overlong": "split", "overlap": 2, "limit": 16, "validation": 0.2}
    whole = list(follow(folder, **options))
    first, second = follow(folder, **options), follow(folder, **options)
    head = list(itertools.islice(first, stop))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + list(second) == whole
    assert shown(second, head) == shown(first, head)  # items in flight are read again
    assert first.fit.documents > 0


@pytest.mark.parametrize(
    ("taken", "changed", "refused"), [(45, 1, True), (45, 2, True), (40, 2, False), (0, 1, False)]
)
def test_documents_behind_a_saved_position_do_not_change(folder, follow, tmp_path, taken, changed, refused):
    """A shard of another preparation is refused if documents of it were taken, wherever the position is."""
    first = follow(folder)
    list(itertools.islice(first, taken))
    state = json.loads(json.dumps(first.state_dict()))
    for number in range(3):
        write(tmp_path / "other", number, LENGTHS[20 * number : 20 * number + 20] + (number == changed))
    name = f"shard-0000-{changed:05}.safetensors"
    (folder / name).write_bytes((tmp_path / "other" / name).read_bytes())
    if refused:
        with pytest.raises(ValueError, match=f"{folder.name} holds other documents"):
            follow(folder).load_state_dict(state)
        return
    follow(folder).load_state_dict(state)


def test_a_store_of_another_source_is_another_stream(follow, tmp_path):
    for key in ("a", "b"):
        write(tmp_path / key, 0, LENGTHS, key=key)
    state = follow(tmp_path / "a").state_dict()
    with pytest.raises(ValueError, match="another stream"):
        follow(tmp_path / "b").load_state_dict(state)


def test_some_of_the_first_documents_are_held_back(folder, follow, tmp_path):
    arriving = follow(folder, validation=0.2)
    held = validation_names(arriving)
    assert len(held) == 4  # of the 20 of the first shard
    trained = [item["name"].split(": ")[1] for item in arriving]
    assert not set(held) & set(trained)
    assert len(trained) == 56
    assert validation_names(follow(folder, validation=0.2)) == held
    assert validation_names(follow(folder, validation=0.2, split_seed=1)) != held
    write(tmp_path / "large", 0, [3] * (HEAD + 1000))
    complete(tmp_path / "large")
    arriving = follow(tmp_path / "large", validation=0.5)
    assert len(arriving.validation) == HEAD // 2
    assert int(arriving.validation.pieces["document"].max()) < HEAD


def test_a_missing_shard_is_awaited_and_then_named(folder, follow, tmp_path):
    with pytest.raises(ValueError, match=r"waited 0\.2 s for .*shard 0 of .*nothing \(0 shards are there"):
        follow(tmp_path / "nothing", patience_seconds=0.2)
    reopen(folder)
    arriving = follow(folder, patience_seconds=0.2)
    items = iter(arriving)
    assert len(list(itertools.islice(items, 60))) == 60
    with pytest.raises(ValueError, match=r"shard 3 of .* \(3 shards are there, and none of them is the last"):
        next(items)
    complete(folder)
    assert list(arriving) == []  # waiting again finds that it is complete; nothing was lost


def test_impossible_stores_settings_and_states_are_refused(folder, follow, tmp_path):
    write(tmp_path / "stretch", 0, [50], split_by="position")
    with pytest.raises(ValueError, match="one stream of text"):
        follow(tmp_path / "stretch")
    with pytest.raises(ValueError, match=r"document \d+ \(doc0\.\d+\) has \d+ tokens.* limit of 8"):
        list(follow(folder, limit=8))
    write(tmp_path / "one", 0, [5])
    with pytest.raises(ValueError, match=r"data\.validation=0\.5: 1 document of .*cannot be split"):
        follow(tmp_path / "one", validation=0.5)
    state = follow(folder).state_dict()
    for options in ({"validation": 0.2}, {"limit": 50}):
        with pytest.raises(ValueError, match="another stream"):
            follow(folder, **options).load_state_dict(state)
    with pytest.raises(ValueError, match="lacks number"):
        follow(folder).load_state_dict({key: value for key, value in state.items() if key != "number"})
    for name, value in (
        ("begin", {"shard": "2"}),
        ("begin", {"shard": -1}),
        ("begin", {"shards": 1}),
        ("begin", 5),
        ("number", 0.5),
        ("number", -1),
        ("number", None),
        ("begin", {"shard": 1.0}),
    ):
        with pytest.raises(ValueError, match=str(folder)):
            follow(folder).load_state_dict({**state, name: value})
    for item in ({}, {"shard": 0}, {"shard": "0", "number": 0}, {"shard": 0, "number": 1 << 62}, None):
        with pytest.raises(ValueError, match=r"shard|damaged"):
            follow(folder).document(item)


# --- streamed records ---------------------------------------------------------------------------------


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(room, "RECORDS", 8)
    monkeypatch.setattr(room, "HEAD", 20)


def records():
    draw = np.random.default_rng(2)
    texts = ["" if number % 11 == 5 else "x" * int(draw.integers(1, 30)) for number in range(70)]
    return [{"prompt": f"Q{number}:", "completion": text} for number, text in enumerate(texts)]


@pytest.fixture
def stream(config, small_chunks):
    def make(rows=None, limit=64, tokenizer="byte", **fields):
        data = config(source="huggingface", path="some/set", stream=True, **{"validation": 0.0} | fields)
        opened = []

        def open_records():
            opened.append(Rows(records() if rows is None else rows))
            return opened[-1]

        made = StreamedRecords(data, limit, TokenizerConfig(kind=tokenizer), open_records)
        made.opened = opened
        return made

    return make


def test_records_become_documents(stream):
    arriving = stream()
    items = list(arriving)
    expected = [record for record in records() if record["completion"]]
    texts = [arriving.tokenizer.decode(arriving.document(item).tokens.tolist()) for item in items]
    assert texts == [f"{record['prompt']}\n{record['completion']}" for record in expected]
    first = arriving.document(items[0])
    assert first.tokens[-1] == arriving.tokenizer.end_id
    assert first.spans.tolist() == [[4, len(first.tokens)]]
    assert [item["targets"] for item in items] == [len(record["completion"]) + 1 for record in expected]
    assert [items[number]["name"] for number in (4, 5)] == ["set:5", "set:7"]  # the sixth is empty
    assert arriving.noted.skipped == {"empty completions": 6}
    json.dumps(items)


@pytest.mark.parametrize("stop", [0, 18, 19, 25, 60, 64])
def test_records_resume_exactly(stream, stop):
    options = {"overlong": "split", "overlap": 1, "limit": 16, "validation": 0.2}
    whole = list(stream(**options))
    first, second = stream(**options), stream(**options)
    head = list(itertools.islice(first, stop))
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    next(iter(second), None)
    if stop > 30:  # the current chunk, possibly the next one, and no record before
        assert second.opened[-1].taken <= 16
    second.load_state_dict(state)
    assert head + list(second) == whole
    second.restart()
    assert list(second) == whole
    list(first)
    assert (first.fit, first.noted) == (second.fit, second.noted)


def test_long_records_are_fitted_and_counted(stream):
    arriving = stream(overlong="split", overlap=2, repeat_prompt=True, limit=12)
    items = list(arriving)
    assert max(item["length"] for item in items) == 12
    assert sum(item["targets"] for item in items) == sum(item["targets"] for item in stream())
    assert arriving.fit.tokens > 0
    with pytest.raises(ValueError, match=r"\(set:\d+\) has \d+ tokens, more than the limit of 12"):
        list(stream(limit=12))


def test_chunks_without_documents_are_passed_over(stream):
    texts = ["long text"] * 20 + ["ab"] * 3 + ["long text"] * 13 + ["", "  "] * 8 + ["cd"]
    arriving = stream([{"text": text} for text in texts], overlong="drop", limit=4)
    assert [item["length"] for item in arriving] == [3] * 4
    assert arriving.fit.documents == 33
    assert arriving.noted.skipped == {"empty documents": 16}
    arriving = stream([{"text": text} for text in ["ab"] * 20 + ["", "  "]])
    for count in (20, 0):
        assert len(list(arriving)) == count
        assert arriving.noted.skipped == {"empty documents": 2}
    for empty in ([], [{"text": ""}] * 40):
        with pytest.raises(ValueError, match="some/set has ended without a document"):
            stream(empty)


def test_the_summary_counts_documents_that_have_arrived(stream):
    rows = [{"text": "a long text", "more": "x"}] * 30 + [{"text": ""}, {"other": 1}]
    arriving = stream(rows, overlong="truncate", limit=4, broken="skip", fields=["text"])
    fit, none = FitReport(4, "truncate"), arriving.validation
    corpus = Corpus(none, none, "", fit, fit, {}, Path(), arriving=arriving)
    ((_, text),) = corpus_notes(corpus)  # the first chunk has been read
    assert text.startswith("20 documents longer than 4 tokens truncated")
    list(arriving)
    arriving.restart()
    list(arriving)  # reads the same records again
    assert corpus_notes(corpus) == [
        (
            "too long, training",
            "30 documents longer than 4 tokens truncated (240 tokens; targets cut off in 30)",
        ),
        ("skipped", "1 empty document: set:31"),
        ("skipped", "1 broken row: set:32"),
    ]


def test_conversations_arrive_and_pairs_do_not(stream):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}
    arriving = stream([chat] * 3, chat_template="chatml")
    assert all(0 < item["targets"] < item["length"] - 1 for item in arriving)
    assert "im_start" in arriving.validation.store.header.chat_template
    empty = {"messages": [*chat["messages"], {"role": "assistant", "content": ""}]}
    arriving = stream([chat, empty] * 15, chat_template="chatml")
    assert arriving.warnings[0].startswith("10 conversations with an empty answer")  # of the first chunk
    list(arriving)
    (warning,) = arriving.warnings
    assert warning.startswith("15 conversations with an empty answer")
    assert warning.endswith("(the first: set:2)")
    with pytest.raises(ValueError, match=r"tokenizer\.kind=auto is trained on a complete corpus"):
        stream(tokenizer="auto")
    pair = {"prompt": "p", "chosen": "c", "rejected": "r"}
    with pytest.raises(ValueError, match="some/set holds preference pairs"):
        stream([pair])


def test_an_error_in_a_record_names_it_and_loses_nothing(stream):
    broken = [{"text": "a"}] * 20 + [{"text": "b"}] * 3 + [{"other": 1}] + [{"text": "c"}] * 4
    arriving, seen = stream(broken), []
    for _ in range(2):
        with pytest.raises(ValueError, match="some/set, row 24"):
            seen.extend(arriving)
    broken[23] = {"text": "b"}
    seen.extend(arriving)
    assert [item["length"] for item in seen] == [2] * 28


def test_a_streamed_hugging_face_data_set_resumes(config, tmp_path, small_chunks):
    datasets = pytest.importorskip("datasets", reason="the extra huggingface is not installed")
    datasets.Dataset.from_list(records()).save_to_disk(str(tmp_path / "set"))
    data = config(source="huggingface", path=str(tmp_path / "set"), stream=True, validation=0.2)

    def open_stream():
        return load_corpus(data, TokenizerConfig(kind="byte"), limit=64).arriving

    whole = list(open_stream())
    assert len(whole) + len(open_stream().validation) == 64
    first, second = open_stream(), open_stream()
    head = list(itertools.islice(first, 40))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.state_dict()["begin"]["source"] is not None
    assert head + list(second) == whole

"""Records that are tokenized as they arrive: what they become, going on with and without a source's own state."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from multipack.data import streamed
from multipack.data.corpus import Corpus
from multipack.data.fit import FitReport
from multipack.data.streamed import StreamedRecords
from multipack.data.tokenizer import TokenizerConfig
from multipack.training.run_report import corpus_notes


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(streamed, "RECORDS", 8)
    monkeypatch.setattr(streamed, "HEAD", 20)


def records(count=70):
    draw = np.random.default_rng(2)
    for number in range(count):
        text = "" if number % 11 == 5 else "x" * int(draw.integers(1, 30))
        yield {"prompt": f"Q{number}:", "completion": text}


class Counting:
    """Records that can be iterated again, and say how many were read."""

    def __init__(self, count=70):
        self.count, self.read = count, 0

    def __iter__(self):
        for record in records(self.count):
            self.read += 1
            yield record


class Seekable(Counting):
    """Records that know where they stand, as streamed data sets do."""

    def __init__(self, count=70):
        super().__init__(count)
        self.begin = self.at = 0

    def __iter__(self):
        self.at = self.begin
        for record in itertools.islice(records(self.count), self.begin, None):
            self.read, self.at = self.read + 1, self.at + 1
            yield record

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"]


@pytest.fixture
def stream(config):
    def make(source=Counting, limit=64, tokenizer="byte", **fields):
        data = config(source="huggingface", path="some/set", stream=True, **{"validation": 0.0} | fields)
        opened = []

        def open_records():
            opened.append(source())
            return opened[-1]

        made = StreamedRecords(data, limit, TokenizerConfig(kind=tokenizer), open_records)
        made.opened = opened
        return made

    return make


def shown(arriving, items):
    documents = [arriving.document(item) for item in items]
    names = [arriving.document_name(item) for item in items]
    return [(n, d.tokens.tolist(), d.spans.tolist()) for n, d in zip(names, documents, strict=True)]


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
    assert arriving.document_name(items[4]) == "set:5"
    assert arriving.document_name(items[5]) == "set:7"  # the sixth is empty
    assert arriving.skipped == {"empty completions": 6}
    json.dumps(items)


@pytest.mark.parametrize("source", [Counting, Seekable])
@pytest.mark.parametrize("stop", [0, 3, 18, 19, 25, 26, 60, 64])
def test_reading_goes_on_where_it_stopped(stream, source, stop):
    options = {"overlong": "split", "overlap": 1, "limit": 16, "validation": 0.2}
    whole = list(stream(**options))
    first = stream(source, **options)
    head = list(itertools.islice(first, stop))
    second = stream(source, **options)
    before = sum(each.read for each in second.opened)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    items = iter(second)
    next(items, None)
    if source is Seekable and stop > 30:
        # The present chunk, the next one where it was at its end, and no record before.
        assert sum(each.read for each in second.opened) - before <= 16
    second.load_state_dict(first.state_dict())
    assert head + list(second) == whole
    list(first)
    assert (first.report, first.skipped) == (second.report, second.skipped)
    second.restart()
    assert list(second) == whole


def test_some_of_the_first_records_are_held_back(stream):
    arriving = stream(validation=0.25)
    validation = arriving.validation
    assert len(validation) == round(0.25 * 18)  # of 20 records, two of which are empty
    held = [validation.names(number) for number in range(len(validation))]
    trained = [name for name, *_ in shown(arriving, list(arriving))]
    assert sorted([*held, *trained], key=lambda name: int(name[4:])) == [
        name for name, *_ in shown(stream(), list(stream()))
    ]
    assert all(int(name[4:]) <= 20 for name in held)
    assert validation.target_counts.tolist() == [
        int((each.shifted_targets() >= 0).sum()) for each in validation
    ]
    assert validation.fingerprint == stream(validation=0.25).validation.fingerprint


def test_long_documents_are_fitted_and_counted(stream):
    arriving = stream(overlong="split", overlap=2, repeat_prompt=True, limit=12)
    items = list(arriving)
    assert max(item["length"] for item in items) == 12
    assert sum(item["targets"] for item in items) == sum(item["targets"] for item in stream())
    assert arriving.report.split_documents > 0
    assert arriving.report.repeated_tokens > 0
    with pytest.raises(ValueError, match=r"\(set:\d+\) has \d+ tokens, more than the limit of 12"):
        list(stream(limit=12))


def test_chunks_of_which_nothing_remains_are_passed_over(stream):
    texts = ["long text"] * 20 + ["ab"] * 3 + ["long text"] * 13 + ["", "  "] * 8 + ["cd"]
    arriving = stream(lambda: [{"text": text} for text in texts], overlong="drop", limit=4)
    assert [item["length"] for item in arriving] == [3] * 4
    assert arriving.report.dropped_documents == 33
    assert arriving.report.dropped_tokens == 330
    assert arriving.skipped == {"empty documents": 16}


def test_what_is_left_out_at_the_very_end_is_counted_too(stream):
    texts = ["ab"] * 20 + ["", "  "]
    arriving = stream(lambda: [{"text": text} for text in texts])
    assert len(list(arriving)) == 20
    assert arriving.skipped == {"empty documents": 2}
    assert list(arriving) == []
    assert arriving.skipped == {"empty documents": 2}


def test_notes_say_what_became_of_the_documents_that_have_arrived(stream):
    arriving = stream(lambda: [{"text": "a long text"}] * 30 + [{"text": ""}], overlong="truncate", limit=4)
    nothing = FitReport(4, "truncate")
    corpus = Corpus(
        train=arriving.validation,
        validation=arriving.validation,
        tokenizer=arriving.tokenizer,
        corpus_hash="",
        description="",
        train_fit=nothing,
        validation_fit=nothing,
        skipped={},
        prompts=(),
        store_path=Path(),
        arriving=arriving,
    )
    assert corpus_notes(corpus) == []
    list(arriving)
    assert corpus_notes(corpus) == [
        ("too long, training", "30 documents longer than 4 tokens truncated (240 tokens)"),
        ("skipped", "1 empty documents"),
    ]


def test_conversations_arrive_too(stream):
    def chats():
        return [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}] * 3

    arriving = stream(chats, chat_template="chatml")
    items = list(arriving)
    assert len(items) == 3
    assert all(0 < item["targets"] < item["length"] - 1 for item in items)
    assert "im_start" in arriving.chat_template


def test_a_tokenizer_that_needs_training_is_refused(stream):
    for kind in ("auto", "bpe", "char"):
        with pytest.raises(ValueError, match=rf"tokenizer\.kind={kind} is trained on a complete corpus"):
            stream(tokenizer=kind)


def test_an_error_in_a_record_names_it_and_loses_nothing(stream):
    broken = [{"text": "a"}] * 20 + [{"text": "b"}] * 3 + [{"other": 1}] + [{"text": "c"}] * 4

    arriving = stream(lambda: broken)
    seen = []
    with pytest.raises(ValueError, match="some/set, row 24"):
        seen.extend(arriving)
    with pytest.raises(ValueError, match="some/set, row 24"):
        seen.extend(arriving)
    broken[23] = {"text": "b"}
    seen.extend(arriving)
    assert [item["length"] for item in seen] == [2] * 28


def test_a_source_that_became_shorter_is_noticed(stream):
    first = stream()
    list(itertools.islice(first, 60))
    second = stream(lambda: Counting(30))
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"ends after 30 records, but \d+ had been read"):
        list(second)


def test_no_records_at_all(stream):
    with pytest.raises(ValueError, match="some/set has ended, and there was no document in it"):
        stream(list)
    with pytest.raises(ValueError, match="no document in it"):
        stream(lambda: [{"text": ""}] * 40)


def test_a_streamed_data_set_of_the_library(config, tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra huggingface is not installed")
    from multipack.data.corpus import load_corpus

    datasets.Dataset.from_list(list(records())).save_to_disk(str(tmp_path / "set"))
    data = config(source="huggingface", path=str(tmp_path / "set"), stream=True, validation=0.2)

    def open_stream():
        return load_corpus(data, TokenizerConfig(kind="byte"), limit=64).arriving

    whole = list(open_stream())
    assert len(whole) + len(open_stream().validation) == 64
    first = open_stream()
    head = list(itertools.islice(first, 40))
    second = open_stream()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.state_dict()["place"]["source"] is not None
    assert head + list(second) == whole

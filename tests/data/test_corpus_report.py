import json

import numpy as np
import pytest
from typer.testing import CliRunner

from multipack.cli import app
from multipack.data.stores.prepare import prepare
from multipack.data.stores.shards import shard_name
from multipack.data.stores.writer import StoreWriter
from multipack.data.text.tokenizer import TokenizerConfig, byte_tokenizer
from multipack.data.views.corpus_report import CAPACITIES, CorpusReport
from multipack.reports.summary import histogram_lines, store_rows

BYTE = TokenizerConfig("byte")


def test_the_figures_of_a_corpus(write_store):
    draw = np.random.default_rng(3)
    lengths = [int(length) for length in np.clip(draw.lognormal(5, 1.5, 300), 2, 5000)]
    report = CorpusReport(write_store([[(1, False), (length - 1, True)] for length in lengths]).path)
    assert (report.documents, report.tokens) == (300, sum(lengths))
    assert report.targets == sum(lengths) - 300
    assert report.target_share == report.targets / report.tokens
    assert report.mean == pytest.approx(np.mean(lengths))
    assert (report.median, report.p99) == (np.median(lengths), np.percentile(lengths, 99))
    assert report.longest == max(lengths)
    assert report.longest_name == f"doc{lengths.index(max(lengths))}"
    for bar in report.histogram:
        inside = [length for length in lengths if bar.first <= length <= bar.last]
        assert (bar.documents, bar.tokens) == (len(inside), sum(inside))
    assert sum(bar.documents for bar in report.histogram) == 300
    expected = [
        (capacity, len(longer), sum(longer) - capacity * len(longer))
        for capacity in CAPACITIES
        if (longer := [length for length in lengths if length > capacity])
    ]
    assert report.excess == expected
    assert expected[-1][0] == 4096
    assert json.loads(json.dumps(report.to_dict()))["histogram"][0]["first"] == report.histogram[0].first
    assert (report.shards, report.is_complete, report.pairs) == (1, True, False)


def test_shards_are_reported_as_one_corpus(config, text_file, tmp_path):
    lines = [json.dumps({"text": "a" * (n % 17 + 1)}) for n in range(40)]
    data = config(source="jsonl", path=text_file("\n\n".join(lines), "c.jsonl"), dedup=True)
    whole = CorpusReport(prepare(data, BYTE, tmp_path / "whole"))
    folder = prepare(data, BYTE, tmp_path / "shards", shards=4)
    shards = CorpusReport(folder)
    equal = ("documents", "tokens", "targets", "longest_name", "noted", "histogram", "description", "p99")
    assert [getattr(shards, name) for name in equal] == [getattr(whole, name) for name in equal]
    assert (shards.shards, shards.duplicates) == (2, 23)
    assert shards.noted.skipped == {"blank lines": 39, "duplicates": 23}
    (folder / shard_name(0, 1)).unlink()
    growing = CorpusReport(folder)
    assert (growing.is_complete, growing.description) == (False, "1 shards so far")
    assert ("shards", "1 so far") in store_rows(folder, growing)


def test_what_people_see(config, text_file, tmp_path):
    lines = [json.dumps({"prompt": "Q", "completion": "a" * (3 + 600 * (n == 7))}) for n in range(16)]
    data = config(source="jsonl", path=text_file("\n".join(lines), "c.jsonl"), dedup=True)
    report = CorpusReport(prepare(data, BYTE, tmp_path / "out"))
    rows = dict(store_rows(tmp_path / "out", report))
    assert rows["documents"] == "2"
    assert rows["left out"].startswith("14 duplicates: c.jsonl:2, 3, ")
    assert rows["longest"] == "606 tokens: c.jsonl:8"
    assert rows["targets"] == "608 (99.3% of the tokens)"
    assert rows["too long"] == "for packs of 512: 50.00% of the documents, by 15.36% of the tokens"
    drawn = histogram_lines(report, 60)
    assert [line.split()[0] for line in drawn] == ["4", "8", "16", "32", "64", "128", "256", "512"]
    assert max(map(len, drawn)) <= 60
    assert [line.count("█") > 20 for line in drawn] == [True, *[False] * 6, True]
    stream = config(source="text", path=text_file("abc " * 400), documents="stream")
    report = CorpusReport(path := prepare(stream, BYTE, tmp_path / "stream"))
    rows = dict(store_rows(path, report))
    assert rows["documents"] == "one stream, which training cuts into blocks"
    assert not {"lengths", "longest", "too long"} & rows.keys()


def test_there_must_be_a_corpus(tmp_path):
    with pytest.raises(ValueError, match="not a token store"):
        CorpusReport(tmp_path)
    with StoreWriter(tmp_path / "empty", byte_tokenizer()):
        pass
    with pytest.raises(ValueError, match="has no documents"):
        CorpusReport(tmp_path / "empty")


def test_the_command_line_reports_what_it_prepares(text_file, tmp_path):
    lines = [json.dumps({"text": "a" * (n % 7 + 1)}) for n in range(20)]
    words = ["data=jsonl", f"data.path={text_file(chr(10).join(lines), 'c.jsonl')}", "tokenizer=byte"]
    folder = tmp_path / "out"
    shown = CliRunner().invoke(app, ["prepare", *words, "--store", str(folder), "--shards", "2"])
    assert "shards      2\n" in shown.output
    report = CliRunner().invoke(app, ["prepare", "--report", str(folder)]).output
    assert shown.output == f"{report}\nto train on it:\n  multipack train data=store data.path={folder}\n"
    told = json.loads(CliRunner().invoke(app, ["prepare", "--report", str(folder), "--json"]).stdout)
    assert (told["documents"], told["duplicates"], told["shards"]) == (20, 0, 2)
    assert told["histogram"] == CorpusReport(folder).to_dict()["histogram"]
    for more in (words, ["--engine", "ray"], ["--shards", "2"]):
        refused = CliRunner().invoke(app, ["prepare", *more, "--report", str(folder)])
        assert "only reports: leave out settings and all options but --json" in str(refused.exception)


def test_parts_may_end_in_any_order_on_the_command_line(text_file, tmp_path):
    for file in range(3):
        text_file(json.dumps({"text": f"text {file}"}), f"{file}.jsonl")
    words = [
        "data=jsonl",
        f"data.path={tmp_path}/*.jsonl",
        "tokenizer=byte",
        "--store",
        str(tmp_path / "out"),
    ]
    for part in (3, 2):
        shown = CliRunner().invoke(app, ["prepare", *words, f"--part={part}/3"])
        assert shown.exit_code == 0
        assert f"part {part}/3 of {tmp_path / 'out'} is finished, and other parts are missing" in " ".join(
            shown.output.split()
        )
    assert "shards      3" in CliRunner().invoke(app, ["prepare", *words, "--part=1/3"]).output

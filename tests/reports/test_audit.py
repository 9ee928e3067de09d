"""`multipack audit`: random histories of runs are accounted for, and planted mistakes are named."""

import json
from collections import Counter
from hashlib import sha256

import numpy as np
import pytest
from typer.testing import CliRunner

from multipack.cli import app
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.planning.stream import PackStream
from multipack.reports.audit import audit
from multipack.reports.summary import audit_rows
from multipack.run import RunDirectory
from multipack.training.run_files import RunLog


class History:
    """A run of random documents and options: killed, resumed from any checkpoint, with other worlds, and recorded.

    Attributes:
        trained: (epoch, documents that the ranks were given) of each step that the weights have seen.
        plans: epoch → its plan.
        left: what a stream left over, and the number of its documents, if it ended.
    """

    def __init__(self, folder, number):
        self.draw = np.random.default_rng(number)
        self.is_stream = number % 5 == 0
        count = int(self.draw.integers(20, 90))
        self.lengths = self.draw.lognormal(3, 0.8, count).clip(1, 128).astype(int)
        fitting = max(int(self.lengths.sum()) // 256, 1)  # so that documents fill two steps
        self.packs = min(int(self.draw.integers(1, 5)), fitting)
        tails = ["keep", "drop"] if self.is_stream else ["keep", "drop", "carry"]
        self.options = {
            "capacity": 128,
            "packs_per_step": self.packs,
            "tail": str(self.draw.choice(tails)),
            "window": 2,
        }
        self.seed, self.run = number, RunDirectory(folder)
        self.run.create("train:\n  steps: 1\n")
        self.trained, self.plans, self.left = [], {}, None
        self.saved = [(0, None, None)]
        for _ in range(int(self.draw.integers(1, 5))):
            self._session()

    def _session(self):
        """A process: resumes from the last checkpoint, sometimes an older one, and ends at any step."""
        back = 1 if self.draw.random() < 0.7 else int(self.draw.integers(1, len(self.saved) + 1))
        self.saved = self.saved[: len(self.saved) - back + 1]
        step, state, marks = self.saved[-1]
        log, self.trained = RunLog(self.run), self.trained[:step]
        log.cut(marks)
        log.event("start", {"step": step})
        left = int(self.draw.integers(1, 18))
        for record, after in self._stream(state) if self.is_stream else self._epochs(state):
            epoch, given, documents, index, plan = record
            step += 1
            self.trained.append((epoch, given))
            log.documents(step, documents.tolist(), index, plan)
            seconds = float(self.draw.uniform(0.1, 1))
            log.record({"step": step, "loss": 1.0, "dt": seconds, "sps": len(documents) / seconds})
            if self.draw.random() < 0.25:
                self._save(step, after, log.marks())
            left -= 1
            if not left:
                break
        else:  # a stream has ended
            log.event("end", {"step": step, "documents": self.left[1], "dropped": self.left[0]})
        log.close()
        if left == 0 and self.draw.random() < 0.5:  # killed while it wrote
            with self.run.documents.open("a") as file:
                file.write('{"step": 99, "docu')

    def _epochs(self, state):
        world = int(self.draw.integers(1, self.packs + 1))
        sync = str(self.draw.choice(["micro", "step"]))
        more = {"world_size": world, "seed": self.seed, "sync": sync, **self.options}
        ranks = [PackedBatchSampler(self.lengths, rank=rank, **more) for rank in range(world)]
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(json.loads(state))
        epoch, start, _ = ranks[0].position
        while True:
            batches = [iter(sampler) for sampler in ranks]
            for index in range(start, ranks[0].steps_per_epoch):
                micro = ranks[0].micro_batches
                given = [number for own in batches for _ in range(micro) for number in next(own)]
                plan = self.plans[epoch] = ranks[0].plan
                yield (
                    (epoch, given, plan.documents(index), index, plan),
                    json.dumps(ranks[0].state_at(index + 1)),
                )
            epoch, start = epoch + 1, 0
            for sampler in ranks:
                sampler.set_epoch(epoch)

    def _stream(self, state):
        stream = PackStream(list(map(int, self.lengths)), length=int, seed=self.seed, **self.options)
        if state is not None:
            stream.load_state_dict(json.loads(state))
        for step in stream:
            dealt = step.deal(self.packs)
            given = [int(step.positions[place]) for pack in dealt for place in pack]
            yield (0, given, step.positions, step.number, None), json.dumps(step.state_dict())
        self.left = stream.left.tolist(), stream.position

    def _save(self, step, state, marks):
        folder = self.run.checkpoints / f"step-{step:08d}"
        folder.mkdir(exist_ok=True)
        progress = {"data": json.loads(state), "marks": marks}
        (folder / "state.json").write_text(json.dumps({"step": step, "progress": progress}))
        (folder / ".complete").write_text("")
        self.saved.append((step, state, marks))


def _check(history):
    """The audit agrees with what the ranks were given."""
    found = audit(history.run.path)
    assert found.problems == []
    assert [each.trained for each in found.epochs] == list(
        Counter(epoch for epoch, given in history.trained for _ in given).values()
    )
    for each in found.epochs:
        given = Counter(
            number for epoch, numbers in history.trained if epoch == each.epoch for number in numbers
        )
        if each.is_complete and not history.is_stream:
            plan = history.plans[each.epoch]
            expected = Counter([*range(len(history.lengths)), *plan.carried_in.tolist()])
            assert given + Counter([*plan.dropped.tolist(), *plan.carried.tolist()]) == expected
        elif each.is_complete:
            assert given + Counter(history.left[0]) == Counter(range(len(history.lengths)))
        else:
            assert not history.is_stream or max(given.values()) == 1
    return found


def _break(history):
    """Plant a mistake; returns what it is, and the number of the document that must be named, if its epoch ended."""
    lines = history.run.documents.read_text().splitlines()
    lines = lines[:-1] if lines[-1].endswith("docu") else lines
    at = int(history.draw.integers(len(lines)))
    record, kind = (
        json.loads(lines[at]),
        str(history.draw.choice(["lose", "repeat", "lose step", "repeat step"])),
    )
    documents, named = record["documents"], None
    if kind == "lose":
        named = documents.pop(int(history.draw.integers(len(documents))))
    elif kind == "repeat":
        named = int(history.draw.choice(documents))
        documents.append(named)
    lines[at] = json.dumps(record)
    if kind == "lose step":
        del lines[at]
    elif kind == "repeat step":
        lines.insert(at, lines[at])
    history.run.documents.write_text("".join(line + "\n" for line in lines))
    return kind, named, record["epoch"]


def _names(problems, word, document):
    return any(word in problem and str(document) in problem for problem in problems)


CHUNKS = [range(start, min(start + 198, 1000)) for start in range(10, 1000, 198)]


@pytest.mark.parametrize(
    "numbers", [range(10), *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in CHUNKS)], ids=str
)
def test_random_histories(tmp_path, numbers):
    epochs, mistakes = 0, Counter()
    for number in numbers:
        history = History(tmp_path / str(number), number)
        found = _check(history)
        epochs += sum(each.is_complete for each in found.epochs)
        if not history.trained:
            continue
        kind, named, epoch = _break(history)
        after = audit(history.run.path).problems if history.run.documents.stat().st_size else ["no record"]
        assert after, (number, kind)
        mistakes[kind] += 1
        complete = {each.epoch for each in found.epochs if each.is_complete}
        if kind == "lose" and epoch in complete:
            assert _names(after, "lost", named), (number, after)
        if kind == "repeat":
            assert _names(after, "repeated", f"{named:,}"), (number, after)
    assert epochs > len(numbers) / 3
    assert len(mistakes) == 4


def test_a_real_run_that_was_resumed(trained):
    found = audit(trained)
    assert found.problems == []
    first, second = found.epochs[:2]
    assert (first.is_complete, first.carried > 0, second.carried_in) == (True, True, first.carried)
    assert first.trained + first.carried == first.total
    assert sum(each.steps for each in found.epochs) == 20
    assert CliRunner().invoke(app, ["audit", str(trained)]).exit_code == 0
    rows = dict(audit_rows(found))
    assert "each exactly once" in rows["epoch 0"]
    # A document of the first step in place of one of the second.
    lines = (trained / "documents.jsonl").read_text().splitlines()
    one, two = json.loads(lines[0]), json.loads(lines[1])
    lost, two["documents"][0] = two["documents"][0], one["documents"][0]
    (trained / "documents.jsonl").write_text("\n".join([lines[0], json.dumps(two), *lines[2:]]) + "\n")
    problems = audit(trained).problems
    repeated = one["documents"][0]
    assert f"epoch 0: document {repeated} is repeated: it is in step 1 and in step 2" in problems
    assert f"epoch 0: document {lost} lost: in no step, not carried, not dropped" in problems
    assert any("does not begin with what step-000000" in problem for problem in problems)
    result = CliRunner().invoke(app, ["audit", str(trained), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["epochs"][0]["repeated"] == 1


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        '{"step": 1, "epoch": 0, "index": 0, "documents": [-1]}',
        '{"step": 1, "epoch": 0, "index": 0, "documents": [1e3]}',
        '{"step": true, "epoch": 0, "index": 0, "documents": []}',
        '{"step": 1, "epoch": 0, "index": 0, "plan": {"documents": 9007199254740000, "steps": 1, "carried_in": [],'
        ' "carried": [], "dropped": []}, "documents": [3]}',
        '{"step": 1, "epoch": 0, "index": 0, "plan": {"documents": "5"}, "documents": [3]}',
        '{"step": 1, "epoch": 7, "index": 3, "documents": [3]}\n{"step": 2, "epoch": 9, "index": 0, "documents": [3]}',
    ],
)
def test_foreign_records_are_problems(tmp_path, line):
    run = RunDirectory(tmp_path / "run")
    run.create("train:\n  steps: 1\n")
    run.documents.write_text(line + "\n")
    problems = audit(run.path).problems
    assert problems
    assert all("\n" not in problem and len(problem) < 300 for problem in problems)


def test_what_cannot_be_audited_is_said(written, tmp_path):
    path = written()
    result = CliRunner().invoke(app, ["audit", str(path)])
    assert "has no record of documents" in str(result.exception)
    assert "is neither a run directory" in str(CliRunner().invoke(app, ["audit", str(tmp_path)]).exception)
    # A run of an earlier version that was resumed: its first steps are unknown, and said to be.
    plan = {"documents": 2, "steps": 1, "carried_in": [], "carried": [], "dropped": []}
    lines = [
        {"step": 31, "epoch": 0, "index": 30, "documents": [4, 5]},
        {"step": 32, "epoch": 1, "index": 0, "plan": plan, "documents": [1, 0]},
    ]
    (path / "documents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "history.jsonl").write_text('{"event": "start", "step": 30}\n')
    metrics = [{"step": line["step"], "loss": 1.0, "skipped": int(line["step"] == 32)} for line in lines]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    found = audit(path)
    assert found.problems == []
    assert found.notes == [
        "documents are recorded from step 31 on: steps before it are not audited",
        "skipped, by fp16 overflow or a spike: the documents of step 32 changed no weight",
    ]
    (path / "history.jsonl").unlink()
    assert audit(path).problems == ["documents.jsonl begins with step 31, and its run with step 1"]


def test_marks_of_checkpoints_are_compared(written):
    path = written(steps=2)
    lines = [
        json.dumps({"step": step, "epoch": 0, "index": step - 1, "documents": [step]}) + "\n"
        for step in (1, 2)
    ]
    (path / "documents.jsonl").write_text("".join(lines))
    folder = path / "checkpoints" / "step-00000001"
    folder.mkdir()
    (folder / ".complete").write_text("")
    mark = {"bytes": len(lines[0]), "sha256": sha256(lines[0].encode()).hexdigest()}

    def state(**data):
        metrics = {"bytes": 0, "sha256": sha256().hexdigest()}
        progress = {"data": {"epoch": 0, "step": 1, **data}, "marks": {"documents": mark, "metrics": metrics}}
        (folder / "state.json").write_text(json.dumps({"step": 1, "progress": progress}))
        return audit(path)

    assert state().problems == []
    assert state().notes == [
        "after the last checkpoint: step 2; resuming cuts the record and trains them again"
    ]
    assert "resumes in epoch 0 after 2 steps" in state(step=2).problems[0]
    (folder / "state.json").write_text('{"step": 1')
    assert "cannot be read" in audit(path).notes[0]

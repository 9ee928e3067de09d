"""Two runs in one directory: one wins, the other changes nothing and is refused in one line."""

import forked

RACES = 20


def test_one_of_two_new_runs_wins(tmp_path, words, outcome):
    """Both make the directory at the same moment, as processes of one scheduler do."""
    lost, wins = [], 0
    for number in range(RACES):
        out = tmp_path / f"run-{number}"
        rates = ("2e-3", "3e-3")
        started = [
            forked.start(
                tmp_path, forked.create, str(out), f"optimizer: {{lr: {rate}}}\n", str(tmp_path / "go")
            )
            for rate in rates
        ]
        (tmp_path / "go").touch()
        ended = [each.wait() for each in started]
        (tmp_path / "go").unlink()
        codes = sorted(each.code for each in ended)
        winner = next((rate for rate, each in zip(rates, ended, strict=True) if each.code == 0), "none")
        wins += codes == [0, 2]
        if codes != [0, 2] or f"lr: {winner}" not in (out / "config.yaml").read_text():
            lost.append([(each.code, each.error) for each in ended])
        elif not any("exists and is not empty" in each.error for each in ended):
            lost.append([each.error for each in ended])
        if {path.name for path in out.iterdir()} != {
            "config.yaml",
            "documents.jsonl",
            "checkpoints",
            "metrics.jsonl",
            "samples.txt",
        }:
            lost.append(sorted(path.name for path in out.iterdir()))
    outcome("races", RACES)
    outcome("one winner", wins)
    assert not lost, lost


def test_one_of_two_resumed_runs_wins(tmp_path, words, outcome):
    out = tmp_path / "run"
    assert forked.start(tmp_path, forked.run, [*words, f"out={out}"]).wait().code == 0
    wins, races, steps = 0, 4, 6
    for _ in range(races):
        steps += 6
        again = [f"out={out}", "train.resume=true", f"train.steps={steps}"]
        ended = [each.wait() for each in [forked.start(tmp_path, forked.run, again) for _ in range(2)]]
        refused = [each for each in ended if each.code == 2 and "another process is running" in each.error]
        # The second may come when the first has ended: it then trains nothing, or the same steps again.
        wins += sorted(each.code for each in ended) in ([0, 2], [0, 0]) and len(refused) <= 1
        taken = [record["step"] for record in forked.records(out) if "loss" in record]
        assert taken == list(range(1, steps + 1))
    outcome("races", races)
    assert wins == races

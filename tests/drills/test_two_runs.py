"""Two runs in one directory: one wins, the other changes nothing and is refused in one line."""

import forked

RACES = 20


def test_one_of_two_new_runs_wins(tmp_path, finish):
    """Both make the directory at the same moment, as processes of one scheduler do."""
    lost = []
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
        if codes != [0, 2] or f"lr: {winner}" not in (out / "config.yaml").read_text():
            lost.append([(each.code, each.error) for each in ended])
        elif not any("exists and is not empty" in each.error for each in ended):
            lost.append([each.error for each in ended])
        files = sorted(path.name for path in out.iterdir())
        if files != ["checkpoints", "config.yaml", "documents.jsonl", "metrics.jsonl", "samples.txt"]:
            lost.append(files)
    finish(lost, races=RACES)


def test_one_of_two_resumed_runs_wins(tmp_path, words, finish):
    out = tmp_path / "run"
    assert forked.start(tmp_path, forked.run, [*words, f"out={out}"]).wait().code == 0
    lost, races = [], (12, 18, 24, 30)
    for steps in races:
        again = [f"out={out}", "train.resume=true", f"train.steps={steps}"]
        ended = [each.wait() for each in [forked.start(tmp_path, forked.run, again) for _ in range(2)]]
        refused = [each for each in ended if each.code == 2 and "another process is running" in each.error]
        # The second may come when the first has ended: it then trains nothing, or the same steps again.
        codes = sorted(each.code for each in ended)
        lost += [] if codes in ([0, 2], [0, 0]) and len(refused) <= 1 else [codes]
        taken = [record["step"] for record in forked.records(out) if "loss" in record]
        assert taken == list(range(1, steps + 1))
    finish(lost, races=len(races))

"""Commands, links and names of files in README and docs/ are legal; the first screen of the README runs."""

import json
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = [
    (page.name, command.removeprefix("$ ").removeprefix("multipack "))
    for page in PAGES
    # Lines of code blocks, and commands with arguments in the text.
    for command in dict.fromkeys(
        re.findall(
            r"^(?:\$ )?multipack .*?(?=\s{2,}#|$)|(?<=`)multipack \w+ [^`]+", page.read_text(), re.MULTILINE
        )
    )
]


def test_commands_have_legal_options():
    import typer

    from multipack.cli import app

    wrong, whole = [], typer.main.get_command(app)
    for page, command in COMMANDS:
        parser = whole
        words = [word for word in shlex.split(command.partition(" > ")[0]) if word not in ("…", "--settings")]
        while words and words[0] in getattr(parser, "commands", {}):
            parser, words = parser.commands[words[0]], words[1:]
        try:
            parser.make_context(command, words)
        except Exception as error:
            wrong.append(f"{page}: {command}: {error}")
    pages = {page for page, _ in COMMANDS}
    assert {"README.md", "guide.md", "choosing.md", "pipeline.md"} <= pages
    assert not wrong, "\n".join(wrong)


def test_settings_in_commands_are_legal():
    """Every `group.key=value` of every command composes (paths need not exist for that)."""
    from multipack.cli.plan_settings import PackCommand, PlanCommand
    from multipack.launch.advise_request import AdviseRequest
    from multipack.training.other_names import translate
    from multipack.training.run_config import compose
    from multipack.words import merge

    commands = {"plan": PlanCommand, "pack": PackCommand, "advise": AdviseRequest}
    wrong = []
    for page, command in COMMANDS:
        name, *words = command.replace("'", "").split()
        settings = [
            word for word in words if "=" in word and not word.startswith(("-", "config=", "train.resume="))
        ]
        try:
            if name in commands:
                merge(commands[name], settings, translate=translate)
            else:
                compose(settings)
        except ValueError as error:
            wrong.append(f"{page}: {command}: {error}")
    assert len(COMMANDS) >= 30
    assert not wrong, "\n".join(wrong)


def test_named_files_exist():
    """Tests, benchmarks and examples that pages name."""
    wrong = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(r"`(?:python )?((?:tests|benchmarks|examples)/[\w/]+\.py)", page.read_text())
        if not (ROOT / name).exists()
    ]
    assert not wrong, wrong


def test_links_lead_somewhere():
    wrong = [
        f"{page.name}: {target}"
        for page in [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not wrong, wrong


def test_the_first_run_of_the_readme(tmp_path, monkeypatch, known_peak):
    """Each command of the first screen, on small chats and a small model of transformers."""
    from typer.testing import CliRunner

    from multipack.cli import app

    (block,) = re.findall(
        r"<!-- tested: first run -->\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    commands = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    monkeypatch.chdir(tmp_path)
    for name, count in (("chats", 24), ("held", 4), ("test", 4)):
        turns = [[("user", f"Question {n}?"), ("assistant", f"Answer {n}.")] for n in range(count)]
        chats = [{"messages": [{"role": role, "content": text} for role, text in turn]} for turn in turns]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))

    def run(*words, said=""):
        done = CliRunner().invoke(app, list(words), input=said, catch_exceptions=False)
        assert done.exit_code == 0, words
        return done.output

    small = ["train.steps=2", "train.dtype=fp32", "train.sample_tokens=0"]
    run(
        "train",
        "model=tiny",
        "data=jsonl",
        "data.path=chats.jsonl",
        "tokenizer=byte",
        *small,
        "out=runs/base",
    )
    run("export", "runs/base", "models/llama")
    shown = [run(*words, *(small if words[0] == "train" else []), said="Hello\n") for words in commands]
    assert [words[0] for words in commands] == [
        *("prepare", "plan", "train", "evaluate", "report", "export", "generate")
    ]
    for output, expected in zip(
        shown, ("⟦Answer 0.<|im_end|>⟧", "multipack train", "runs/chat"), strict=False
    ):
        assert expected in output
    assert "perplexity" in shown[3]
    assert Path("chat.html").stat().st_size > 10_000
    assert Path("exported/model.safetensors").is_file()

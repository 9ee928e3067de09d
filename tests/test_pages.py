"""What README and docs/ show is so: commands, their outputs, Python, names of files and links.

Every command runs: those of seconds always, those that train or start processes as slow tests. A block of ```console
has commands after `$ ` and their output, in which … stands for any text. Commands of other blocks run in their order,
in a folder with the files that pages take for granted, and with the settings of a small run. The ranks of
`multipack launch` are processes of a server that has loaded torch. Python runs after `<!-- tested -->` as it stands,
elsewhere with the names of `names_of`.
"""

import contextlib
import gzip
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import typer.main
from typer.testing import CliRunner

from drills import forked

ROOT = Path(__file__).parents[1]
PAGES = {
    page.relative_to(ROOT).as_posix(): page for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
OTHERS = {
    r"pip install ": "`make dist` and tests/versions.sh install in empty environments",
    r"make (train|test|drills|gpu-check|dist|docs)": "hosted tests, tests/test_dist.py, tests/test_site.py",
    r"python benchmarks/(parallel|planning|packing|draws)": "tests of benchmarks run them on less data",
    r"git clone ": "needs a network",
}
"""Commands that other tests run → which."""
ELSEWHERE = {"docs/support.md": "generated"}
QUICK = ("plan", "pack", "advise", "config", "import-config", "recipe", "submit")
SMALL = {
    "data": "jsonl",
    "data.path": "train.jsonl",
    "tokenizer": "byte",
    "model.layers": 4,  # two stages each of two ranks
    "model.d_model": 32,
    "model.d_ff": 48,
    "model.heads": 4,
    "model.kv_heads": 4,
    "model.vocabulary_size": 264,
    "plan.capacity": 256,
    "plan.packs_per_step": 4,
    "train.steps": 2,
    "train.eval_every": 2,
    "train.sample_tokens": 0,
}
"""What a command that trains gets where it does not say otherwise; steps are always these."""
PLACES = {"/shared/books": "books.store", "/local/scratch": "scratch", "/dev/shm": "scratch"}


def blocks_of(text):
    """The commands of each of a page's blocks without output."""
    for language, block in FENCED.findall(text):
        if language in ("", "bash", "sh"):
            lines = block.replace("\\\n", " ").splitlines()
            yield [line for line in lines if re.match(r"(multipack|python|pip|make|git|mkdir)\s", line)]


def commands_of(text):
    """Commands of a page's blocks without output, in order."""
    return [command for block in blocks_of(text) for command in block]


def consoles_of(text):
    """(command, its output) of a page's ```console blocks."""
    for language, block in FENCED.findall(text):
        if language == "console":
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                yield command, output


def is_others(command):
    return any(re.match(pattern, command) for pattern in OTHERS)


def is_quick(command):
    words = shlex.split(command, comments=True)
    if words[0] != "multipack" or "--picture" in words:
        return False
    return words[1:2] and (words[1] in QUICK or not {"--dry-run", "--settings"}.isdisjoint(words))


def shortened(words):
    """Words of a command, as those of a run of seconds."""
    words = [word for word in words if not word.startswith("train.steps=")]
    for name, place in PLACES.items():
        words = [word.replace(name, place) for word in words]
    if "prepare" in words:
        return [*words, *([] if "--report" in words else ["tokenizer=byte"])]
    if "train" not in words:
        return words
    given = {word.partition("=")[0] for word in words}
    if "data=store" in words or "data=mixture" in words:
        given |= {"tokenizer", "data.path"}
    if "train.epochs" in given:
        given.add("train.steps")
    if "train.resume=true" in words or "config=ours.yaml" in words:
        return words
    if given & {"train.init_from"}:
        given |= {name for name in SMALL if name.startswith(("model.", "tokenizer"))}
    return [*words, *(f"{name}={value}" for name, value in SMALL.items() if name not in given)]


def run(command):
    """Run a command of `multipack` in this process, and others in one of their own.

    Returns:
        Exit code and output.
    """
    words, _, target = command.partition(" > ")
    words = shlex.split(words, comments=True)
    if words[0] == "mkdir":
        code, output = 0, str(Path(words[1]).mkdir() or "")
    elif words[:2] == ["multipack", "launch"] and "--dry-run" not in words:
        code, output = launched(shortened(words[1:]))
    elif words[0] == "multipack" and words[1] != "watch":
        code, output = called(shortened(words[1:]))
    elif words[0] == "multipack":
        code, output = started(["-m", "multipack", *words[1:]])
    else:
        code, output = started([str(ROOT / words[1]), *words[2:]])
    if target:
        Path(target.split("#")[0].strip()).write_text(output)
    return code, output


def called(words):
    """`multipack` in this process."""
    done = CliRunner().invoke(_app(), words, input="Hello\n")
    crash = done.exception is not None and not isinstance(done.exception, SystemExit)
    return done.exit_code, done.output + repr(done.exception) * crash


def started(words):
    """Python in a process of its own."""
    more = {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, *words], env=os.environ | more, capture_output=True, text=True, timeout=280
    )
    return found.returncode, found.stdout + found.stderr


def launched(words):
    """The ranks of `multipack launch`: of the command that it becomes."""
    with mock.patch("multipack.launch.launcher.become") as become:
        code, output = called(words)
    if code:
        return code, output
    (command,) = become.call_args.args
    size = int(command[command.index("--nproc-per-node") + 1])
    _, *settings = command[command.index("multipack") + 1 :]
    ranks = forked.together(Path("ranks"), settings, size)
    return max(abs(rank.code or 0) for rank in ranks), "".join(rank.text for rank in ranks)


@cache
def _app():
    from multipack.cli import app

    return app


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A folder with what pages take for granted, without models and stores."""
    place = tmp_path_factory.mktemp("pages")
    with contextlib.chdir(place):
        write_files()
    return place


def write_files():
    draw = np.random.default_rng(0)
    np.save("lengths.npy", draw.integers(10, 2000, 500))
    np.save("heavy.npy", np.random.default_rng(0).lognormal(6.5, 1.5, 10_000).astype(int).clip(1, 16_384))
    texts = ["".join(map(chr, draw.integers(97, 123, length))) for length in draw.integers(10, 200, 40)]
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGES["docs/parallel/index.md"].read_text(), re.DOTALL)
    Path("laptop.yaml").write_text(settings)
    Path("axolotl.yml").write_text(AXOLOTL)
    Path("models/llama").mkdir(parents=True)
    Path("models/llama/config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 264} | SIZES)
    )
    rows = {
        "train": [{"text": text} for text in texts],
        "test": [{"text": text[::-1]} for text in texts],
        "held": [{"messages": chat_of(text[::-1])} for text in texts],
        "gsm8k": [{"question": text[:9], "answer": text} for text in texts],
        "chats": [{"messages": chat_of(text), "weight": 0.5} for text in texts],
        "pairs": [{"prompt": text[:5], "chosen": text[:60], "rejected": text[:50][::-1]} for text in texts],
        "labels": [{"prompt": t[:5], "completion": t[:60], "label": i % 2 == 0} for i, t in enumerate(texts)],
    }
    for name, records in rows.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    Path("chats/deep").mkdir(parents=True)
    Path("chats/deep/a.jsonl.gz").write_bytes(gzip.compress(Path("chats.jsonl").read_bytes()))
    for name in ("books", "law"):
        Path(name).mkdir()
        for number, text in enumerate(texts):
            Path(f"{name}/{number}.txt").write_text(f"{text[:60]}\n\n{text[:-60:-1]}")


@pytest.fixture
def folder(written, tmp_path, monkeypatch):
    """A copy of the folder, which is the working directory."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 2048}
AXOLOTL = """base_model: models/llama
datasets: [{path: train.jsonl, ds_type: json, type: completion}]
sequence_len: 256
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 2
max_steps: 2
learning_rate: 0.001
"""


def chat_of(text):
    return [{"role": "user", "content": text[:9]}, {"role": "assistant", "content": text}]


@pytest.fixture(scope="session")
def prepared(written, known_peak, tmp_path_factory):
    """A folder with stores, models of Hugging Face and a run beside those files."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    place = tmp_path_factory.mktemp("prepared")
    shutil.copytree(written, place, dirs_exist_ok=True)
    with contextlib.chdir(place), mock.patch.dict(os.environ, XDG_CACHE_HOME=str(place / "cache")):
        prepare_files()
    return place


def prepare_files():
    import pyarrow
    import pyarrow.parquet
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    Path("web").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "web/a.parquet")
    assert not check("multipack prepare data=jsonl data.path=train.jsonl --store code.store")
    for name in ("chat.store", "books.store", "web.store", "shards"):
        shutil.copytree("code.store", name)
    assert not check("multipack train out=runs/any")
    torch.manual_seed(0)
    letters = {chr(number): number for number in range(256)} | {"<eos>": 256}
    tokenizer = Tokenizer(models.WordLevel(letters, " "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    shape = transformers.LlamaConfig(**SIZES, vocab_size=264, tie_word_embeddings=False, eos_token_id=256)
    for name in ("llama", "my-llama"):
        transformers.LlamaForCausalLM(shape).save_pretrained(f"models/{name}")
        fast.save_pretrained(f"models/{name}")


@pytest.fixture
def filled(prepared, tmp_path, monkeypatch):
    """A copy of that folder, which is the working directory."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    # A cache of compiled code that another version wrote calls its operators.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    return tmp_path


def check(command, accepted=(0,)):
    code, output = run(command)
    return "" if code in accepted else f"$ {command}\nexit code {code}\n{output[-1500:]}"


@pytest.mark.parametrize("page", [name for name in PAGES if name not in ELSEWHERE])
def test_quick_commands(page, folder):
    wrong = [check(command) for command in commands_of(PAGES[page].read_text()) if is_quick(command)]
    assert not any(wrong), "\n".join(wrong)


LONGER = [
    pytest.param(block, id=f"{page}: {block[0][:40]}")
    for page, path in PAGES.items()
    if page not in ELSEWHERE
    for block in blocks_of(path.read_text())
    if any(not is_others(each) and not is_quick(each) for each in block)
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", LONGER)
def test_commands_that_take_longer(block, filled):
    wrong, text = [], "\n".join(block)
    for name in set(re.findall(r"runs/\w+", text)):
        if f"out={name}" not in text:
            shutil.copytree("runs/any", name)
    for command in block:
        if not is_others(command) and (not is_quick(command) or re.search(" > | copy ", command)):
            # A probe ends with 1 where it found something, and a doctor where something is missing here.
            wrong.append(check(command, (0, 1) if re.match("multipack (probe|doctor)", command) else (0,)))
    assert not any(wrong), "\n".join(filter(None, wrong))


def matches(output, shown):
    """Whether an output is the one shown, in which … is any text."""
    pattern = ".*".join(map(re.escape, shown.rstrip("\n").split("…")))
    return re.fullmatch(pattern, output.strip("\n"), re.DOTALL)


CONSOLES = [
    (page, command, output)
    for page, path in PAGES.items()
    for command, output in consoles_of(path.read_text())
]
SAVED = re.compile(r"saved for backward, at most +([\d,]+)")


@pytest.fixture(scope="module")
def counted():
    """A function of a command of benchmarks/method.py → its output, from ranks that other commands use too."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("method_benchmark", ROOT / "benchmarks" / "method.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.ExitStack() as open_pools:
        pools = cache(lambda size: open_pools.enter_context(module.Ranks(size)))

        def call(command):
            with contextlib.redirect_stdout(io.StringIO()) as found:
                words = shlex.split(command)[2:]
                module.main(words, lambda size: contextlib.nullcontext(pools(size)))
            return found.getvalue()

        yield call
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param(command, shown, id=command[:60], marks=[pytest.mark.slow] * (not is_quick(command)))
        for _, command, shown in CONSOLES
    ],
)
def test_outputs_are_those_shown(command, shown, folder, monkeypatch, request):
    monkeypatch.setitem(globals(), "SMALL", {})
    if command.startswith("python benchmarks/method.py"):
        output = request.getfixturevalue("counted")(command)
        peaks = [int(SAVED.search(text)[1].replace(",", "")) for text in (output, shown)]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.05)  # stages differ in what they free first
        output, shown = (SAVED.sub("", text) for text in (output, shown))
    else:
        ranks = command.startswith("multipack launch")  # which print in processes of their own
        code, output = started(["-m", *shlex.split(command)]) if ranks else run(command)
        assert code == 0, output
    assert matches(output, shown), output


def test_no_command_is_left_out():
    """A block with commands has a language that these tests read, and other tests' commands are few."""
    for page, path in PAGES.items():
        for language, block in FENCED.findall(path.read_text()):
            has = re.search(r"^(\$ )?multipack \w", block, re.MULTILINE)
            assert not has or language in ("", "bash", "sh", "console"), f"{page}: ```{language}"
    others = [each for path in PAGES.values() for each in commands_of(path.read_text()) if is_others(each)]
    assert not [each for each in others if each.startswith("multipack")]
    assert sum(len(words_of(path.read_text())) for path in PAGES.values()) >= 100


def test_every_page_of_a_method_has_a_picture_and_a_command_with_its_output():
    for page in (ROOT / "docs" / "parallel").glob("*.md"):
        if page.stem in ("index", "measured"):
            continue
        (picture,) = re.findall(r"!\[[^]]+\]\((\w.*\.svg)\)", page.read_text())
        assert (page.parent / picture).stat().st_size < 150_000
        assert list(consoles_of(page.read_text())) or page.stem == "reading", page


def test_every_ask_has_threads_lines_and_a_test():
    page = PAGES["docs/you-asked.md"].read_text()
    asks = re.findall(r"^\*\*(.+?)\*\*(.+?)(?=^\*\*|^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert len(asks) >= 20
    for symptom, text in asks:
        assert re.search(r"\w#\d+|TokenBudgetBatcher", text), symptom
        assert "`tests/" in text, symptom
        (block,) = re.findall(r"^```(?:python)?\n(.+?)^```", text, re.DOTALL | re.MULTILINE)
        lines = [line for line in block.splitlines() if line and not line.startswith(("from ", "import "))]
        assert len(lines) <= 4, symptom


# Words of commands


def words_of(text):
    """(command, its words) of lines in blocks, and of commands with arguments in the text."""
    found = re.findall(
        r"^(?:\$ )?multipack (.*?)(?=\s{2,}#|$)|(?<=`)multipack (\w+ [^`]+)", text, re.MULTILINE
    )
    return [
        (command, shlex.split(command)) for command in dict.fromkeys(line or other for line, other in found)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_words_of_commands_are_legal(page):
    """Their options parse, and every `group.key=value` composes; paths need not exist for that."""
    wrong = []
    for command, words in words_of(PAGES[page].read_text()):
        try:
            check_options(command.partition(" > ")[0])
            check_settings(*words)
        except Exception as error:
            wrong.append(f"{command}: {error}")
    assert not wrong, "\n".join(wrong)


def check_options(command):
    parser = typer.main.get_command(_app())
    words = [word for word in shlex.split(command) if word not in ("…", "--settings")]
    while words and words[0] in getattr(parser, "commands", {}):
        parser, words = parser.commands[words[0]], words[1:]
    parser.make_context(command, words)


def check_settings(name, *words):
    from multipack.cli.plan_settings import PackCommand, PlanCommand, plan_names
    from multipack.launch.advise_request import AdviseRequest
    from multipack.training.other_names import translate
    from multipack.training.run_config import compose
    from multipack.words import merge

    commands = {"plan": PlanCommand, "pack": PackCommand, "advise": AdviseRequest}
    settings = [
        word for word in words if "=" in word and not word.startswith(("-", "config=", "train.resume="))
    ]
    names = plan_names if name == "plan" else translate
    merge(commands[name], settings, translate=names) if name in commands else compose(settings)


def test_named_files_and_linked_pages_exist():
    named = r"`(?:python )?((?:tests|benchmarks|examples)/[\w/]+\.py)`"
    wrong = [
        f"{page}: {name}"
        for page, path in PAGES.items()
        for name in re.findall(named, path.read_text())
        if not (ROOT / name).exists()
    ]
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    wrong += [
        f"{page}: {name}"
        for page, path in PAGES.items()
        for name in re.findall(r"`(test_\w+)`", path.read_text())
        if f"def {name}(" not in tests
    ]
    wrong += [
        f"{path}: {target}"
        for path in [*PAGES.values(), ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_the_first_run_of_the_readme(folder, known_peak):
    """Each command of the first screen, on a small model of transformers."""
    shutil.rmtree("models/llama")
    for command in ("train data.path=chats.jsonl out=runs/base", "export runs/base models/llama"):
        assert not check(f"multipack {command}")
    page = PAGES["README.md"].read_text()
    (block,) = re.findall(r"<!-- tested: first run -->\n```\n(.*?)```", page, re.DOTALL)
    shown = {}
    for line in block.splitlines():
        _, name, *words = shlex.split(line, comments=True)
        small = ["train.steps=2", "train.dtype=fp32", "train.sample_tokens=0"] if name == "train" else []
        code, shown[name] = called([name, *words, *small])
        assert code == 0, shown[name]
    expected = {
        "prepare": r"<\|im_end\|>⟧",
        "plan": "multipack train",
        "train": "runs/chat",
        "evaluate": "perplexity",
    }
    assert list(shown) == [*expected, "report", "export", "generate"]
    for name, pattern in expected.items():
        assert re.search(pattern, shown[name]), shown[name]
    assert Path("chat.html").stat().st_size > 10_000
    assert Path("exported/model.safetensors").is_file()


# Python


PYTHON = {
    block: (page, bool(mark))
    for page, path in reversed(PAGES.items())
    for mark, block in re.findall(
        r"(<!-- tested -->\n)?^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE
    )
}
"""Python → its first page, and whether it is a whole program; others run with the names of `names_of_hosts`."""
SILENT = {"report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no"}


@pytest.mark.parametrize(
    "block",
    [
        # TRL takes seconds.
        pytest.param(
            block, id=f"{page}: {block[:50]}", marks=[pytest.mark.slow] * ("PackedSFTTrainer(" in block)
        )
        for block, (page, _) in PYTHON.items()
    ],
)
def test_python(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    is_whole = PYTHON[block][1]
    names = {"__name__": "__main__"} if is_whole else names_of(block, monkeypatch)
    exec(compile(block, "page", "exec"), names)
    if is_whole:
        return
    if "trainer" in names:
        assert names["trainer"].state.global_step == 1
    if "PackedDataCollator()([" in block:
        assert names["batch"]["labels"].tolist() == [[-100, 6, 7, -100, 9]]
    if "Tool(" in block:
        assert sorted(names["next_fit"](np.full(4, 5), 10, 2, 0).order) == [0, 1, 2, 3]
    for name in {"loader", "batches", "micro_batches", "shares", "each"} & names.keys():
        assert len(list(names[name]))


def names_of(block, monkeypatch):
    """The names that an excerpt takes for granted."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    for package in ("torchdata", "torchtitan"):
        if re.search(rf"from (multipack\.integrations\.)?{package}", block):
            pytest.importorskip(package, reason=f"{package} is not installed")
    names = names_of_benchmark(monkeypatch) if "Tool(" in block else names_of_hosts()
    return names | (names_of_trl(names) if "PackedSFTTrainer(" in block else {})


def names_of_hosts():
    """A model, its documents, and the settings of a host."""
    import transformers

    import multipack
    from multipack.models.tiny_models import tiny_model

    lengths = [5, 9, 3, 8, 7, 4, 6, 10]
    rows = [np.arange(length, dtype=np.uint16) for length in lengths]
    return {
        "multipack": multipack,
        "PackedCollator": multipack.PackedCollator,
        "model": tiny_model(transformers.LlamaConfig()),
        "args": transformers.TrainingArguments("run", max_steps=1, **SILENT),
        "dataset": [{"input_ids": row.tolist()} for row in rows],
        "documents": [multipack.Document(row, np.array([[2, len(row)]])) for row in rows],
        "lengths": lengths,
        "prompts": [0, 0, 1, 1, 2, 2, 3, 3],
        "prompt_lengths": [2] * len(lengths),
        "targets": sum(lengths) - len(lengths),
        "epochs": 1,
        "rank": 0,
        "ranks": 1,
    }


def names_of_trl(names):
    """The same for TRL, which wants its own kind of data set, and a tokenizer beside the model."""
    for package in ("trl", "peft", "datasets"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import datasets
    import peft
    import trl
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "a": 2}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "a")), pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained("model")
    names["model"].save_pretrained("model")
    names["model"].config._name_or_path = "model"
    settings = SILENT | {
        "output_dir": "run",
        "max_steps": 1,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    return {
        "SFTConfig": partial(trl.SFTConfig, **settings),
        "LoraConfig": partial(peft.LoraConfig, target_modules=["q_proj", "v_proj"]),
        "dataset": datasets.Dataset.from_list(names["dataset"]),
    }


def names_of_benchmark(monkeypatch):
    """What tools of the packing benchmark are written with."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from packing import epoch, tools

    return vars(epoch) | vars(tools)

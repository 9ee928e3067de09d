"""Each layer runs in an environment without the packages of the others: `pip install multipack`, `[hf]`, `[train]`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from multipack.machine import install_words

WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
TRAINER = {"torch", "tokenizers", "safetensors", "jinja2", "transformers", "datasets", "pyarrow"}


def run(code, absent, *arguments):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    command = [sys.executable, "-c", WITHOUT.format(absent=absent) + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


PLANNER = """
import contextlib, io, json
import numpy as np, multipack
lengths = np.load(sys.argv[1])
plan = multipack.plan(lengths, capacity=1024, packs_per_step=4)
dealt = plan.deal(0, 2)
assert sum(len(part) for part in multipack.pack(lengths, 1024)) == len(lengths)
assert len(multipack.balance(lengths, 2, budget=4096)) == 2
multipack.report(plan)
assert multipack.PackStream and multipack.CostModel and multipack.SHAPES
found = {"names": [], "commands": []}
for name in ("Decoder", "PackedCollator", "TokenStore"):
    try:
        getattr(multipack, name)
    except ImportError as error:
        found["names"].append(str(error))
from multipack.cli import main
for words in json.loads(sys.argv[2]):
    sys.argv, code = ["multipack", *words], 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    found["commands"].append((code, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""
PLANS = [
    ["plan", "LENGTHS", "plan.capacity=1024", "world_size=2", "--json"],
    ["pack", "LENGTHS", "plan.capacity=1024", "method=fewest", "--json"],
]
TENSORS = [["train"], ["prepare", "data=stdlib"], ["plan", "FOLDER"]]


def test_the_planner_needs_numbers_only_and_other_commands_name_the_extra(tmp_path):
    """Each in one line, with exit code 2."""
    lengths = tmp_path / "lengths.npy"
    np.save(lengths, np.random.default_rng(0).integers(1, 200, 400))
    places = {"LENGTHS": str(lengths), "FOLDER": str(tmp_path)}
    words = [[places.get(word, word) for word in each] for each in (*PLANS, *TENSORS)]
    done = run(PLANNER, TRAINER, str(lengths), json.dumps(words))
    assert not done.stderr
    found = json.loads(done.stdout)
    for line, name in zip(found["names"], ("Decoder", "PackedCollator", "TokenStore"), strict=True):
        assert line.startswith(f"multipack.{name} needs the package ")
        assert line.endswith("[train]'")
    for code, out, error in found["commands"][: len(PLANS)]:
        assert code == 0, error
        assert json.loads(out)
    for (code, _, error), (name, *_) in zip(found["commands"][len(PLANS) :], TENSORS, strict=True):
        assert (code, error.count("\n")) == (2, 1)
        assert f"multipack {name} needs the package " in error
        assert error.endswith("[train]'\n")


def test_samplers_and_collators_need_torch_only_and_a_host_names_its_extra():
    code = """
import numpy as np, torch
from multipack import Document, PackedBatchSampler, PackedCollator
from multipack.integrations.axolotl import MultipackBatchSampler
from multipack.integrations.multipack_v2 import MultipackDistributedBatchSampler
documents = [Document(np.arange(n, dtype=np.uint16), np.array([[0, n]])) for n in range(2, 60)]
sampler = PackedBatchSampler([len(d.tokens) for d in documents], capacity=128, packs_per_step=2, rank=0, world_size=1)
loader = torch.utils.data.DataLoader(documents, batch_sampler=sampler, collate_fn=PackedCollator.of(sampler))
assert sum(batch.num_documents for batch in loader) == len(documents)
from multipack.integrations.transformers import PackedTrainer
"""
    found = run(code, TRAINER - {"torch"} | {"omegaconf", "typer", "rich"})
    last = found.stderr.splitlines()[-1]
    assert last.endswith("[hf]'"), found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("host", "name"), [("trl", "PackedSFTTrainer"), ("axolotl", "MultipackPlugin")])
def test_other_hosts_name_the_extra(host, name):
    found = run(f"from multipack.integrations.{host} import {name}", {host})
    last = found.stderr.splitlines()[-1]
    assert last.endswith(f"[{host}]'")


GIT = {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "1f3a"}}


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"url": "file:///my%20code", "dir_info": {"editable": True}}, "pip install -e '/my code[train]'"),
        ({"url": "file:///code", "dir_info": {}}, "pip install '/code[train]'"),
        (GIT, "pip install 'multipack[train] @ git+https://host/a.git@1f3a'"),
        (
            {"url": "file:///a/multipack.whl", "archive_info": {}},
            "multipack[train] @ file:///a/multipack.whl'",
        ),
        (None, "pip install 'multipack[train]'"),
    ],
)
def test_words_to_install_an_extra_fit_how_the_package_was_installed(monkeypatch, installed, words):
    text = None if installed is None else json.dumps(installed)
    found = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: found)
    assert install_words("train").endswith(words)


def test_doctor_says_first_that_this_machine_only_plans():
    code = "import os; from multipack.launch.doctor import examine; "
    code += "print(*(f'{one.name}: {one.detail}' for one in examine(os.environ, quick=True)), sep='\\n')"
    found = run(code, TRAINER).stdout
    assert found.splitlines()[0].startswith("multipack: planning only; training needs the package torch: pip")
    assert "launchers: torchrun" not in found

"""Each layer runs in an environment without the packages of the others: `pip install multipack`, `[hf]`, `[train]`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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
COMMAND = "from multipack.cli import main; sys.argv[0] = 'multipack'; main()"


def run(code, absent, *arguments):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    command = [sys.executable, "-c", WITHOUT.format(absent=absent) + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths") / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(1, 200, 400))
    return path


def test_the_planner_needs_numbers_only(lengths):
    code = """
import numpy as np, multipack
lengths = np.load(sys.argv[1])
plan = multipack.plan(lengths, capacity=1024, packs_per_step=4)
dealt = plan.deal(0, 2)
assert sum(len(part) for part in multipack.pack(lengths, 1024)) == len(lengths)
assert len(multipack.balance(lengths, 2, budget=4096)) == 2
multipack.report(plan)
assert multipack.PackStream and multipack.CostModel and multipack.SHAPES
for name in ("Decoder", "PackedCollator", "TokenStore"):
    try:
        getattr(multipack, name)
    except ImportError as error:
        print(error)
"""
    found = run(code, TRAINER, str(lengths))
    assert not found.stderr
    for line, name in zip(
        found.stdout.splitlines(), ("Decoder", "PackedCollator", "TokenStore"), strict=True
    ):
        assert line.startswith(f"multipack.{name} needs the package ")
        assert line.endswith(': pip install "multipack[train]"')


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "plan.capacity=1024", "world_size=2", "--json"),
        pytest.param(("pack", "plan.capacity=1024", "method=fewest", "--json"), marks=pytest.mark.slow),
    ],
)
def test_commands_of_the_planner_need_numbers_only(lengths, words):
    found = run(COMMAND, TRAINER, words[0], str(lengths), *words[1:])
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)


def test_other_commands_name_the_extra(tmp_path):
    """Each in one line, with exit code 2."""
    words = [["train"], ["prepare", "data=stdlib"], ["plan", str(tmp_path)]]
    code = """
import json
from multipack.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["multipack", *words]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 2
"""
    found = run(code, TRAINER, json.dumps(words))
    assert found.returncode == 0, found.stderr
    for line, (name, *_) in zip(found.stderr.splitlines(), words, strict=True):
        assert f"multipack {name} needs the package " in line
        assert line.endswith(': pip install "multipack[train]"')


def test_samplers_and_collators_need_torch_only():
    code = """
import numpy as np, torch
from multipack import Document, PackedBatchSampler, PackedCollator
from multipack.integrations.axolotl import MultipackBatchSampler
from multipack.integrations.multipack_v2 import MultipackDistributedBatchSampler
documents = [Document(np.arange(n, dtype=np.uint16), np.array([[0, n]])) for n in range(2, 60)]
sampler = PackedBatchSampler([len(d.tokens) for d in documents], capacity=128, packs_per_step=2, rank=0, world_size=1)
loader = torch.utils.data.DataLoader(documents, batch_sampler=sampler, collate_fn=PackedCollator.of(sampler))
assert sum(batch.num_documents for batch in loader) == len(documents)
"""
    found = run(code, TRAINER - {"torch"} | {"omegaconf", "typer", "rich"})
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("transformers.PackedTrainer", "transformers", "hf"),
        pytest.param("trl.PackedSFTTrainer", "trl", "trl", marks=pytest.mark.slow),
        pytest.param("axolotl.MultipackPlugin", "axolotl", "axolotl", marks=pytest.mark.slow),
    ],
)
def test_hosts_name_the_extra(name, package, extra):
    host, _, name = name.partition(".")
    found = run(f"from multipack.integrations.{host} import {name}", {package})
    last = found.stderr.splitlines()[-1]
    assert last.endswith(f'needs the package {package}: pip install "multipack[{extra}]"')

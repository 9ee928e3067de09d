"""What settings leave to the run: choices by the device, the initial weights, the documents and the ranks."""

import json
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from multipack.data.views.documents import Document
from multipack.launch.held import model_parameters
from multipack.models import decoder
from multipack.parallel.world import World
from multipack.training import train as train_module
from multipack.training.assemble import resolve
from multipack.training.blueprint import open_engine
from multipack.training.objective import Objective
from multipack.training.preferences import Preferences
from multipack.training.run_config import compose
from multipack.training.run_report import header_rows


@pytest.fixture
def resolved(monkeypatch):
    """(kind of device, words, objective) → the configuration of a run, and its notes."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def choose(device, *words, objective=Objective):
        config = compose(words)
        world = World(device=torch.device(device))
        monkeypatch.setattr(objective, "corpus", SimpleNamespace(arriving=object()), raising=False)
        config, notes = resolve(config, objective, config.shape_with(99), 4, world)
        return config, notes

    return choose


def test_a_gpu_gets_compiled_blocks_and_packs_of_one_shape(resolved):
    for device, words, expected in (
        ("cuda", [], ("true", "true", "bf16")),
        ("cuda", ["plan.budget=1000"], ("true", "false", "bf16")),  # packs would be mostly padding
        ("cpu", ["train.dtype=fp32"], ("false", "false", "fp32")),
        ("cpu", ["train.dtype=bf16"], ("false", "true", "bf16")),  # products are compiled for each shape
        ("cpu", ["train.dtype=bf16", "plan.budget=1000"], ("false", "false", "bf16")),
    ):
        train = resolved(device, *words)[0].train
        assert (train.compile, train.fixed_shape, train.dtype) == expected
    given = resolved("cuda", "train.compile=false", "train.fixed_shape=false", "train.dtype=fp32")[0]
    assert (given.train.compile, given.train.fixed_shape, given.train.dtype) == ("false", "false", "fp32")
    assert given.pack_slots is None
    assert resolved("cuda")[0].pack_slots == given.plan.capacity


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        (("importlib.util.find_spec", lambda name: None), "the package triton is not installed"),
        (("shutil.which", lambda name: None), "there is no gcc or clang"),
        (("torch.cuda.get_device_capability", lambda device: (6, 1)), "capability of this GPU is 6.1, and"),
    ],
)
def test_a_gpu_that_cannot_compile_says_why(resolved, monkeypatch, missing, reason):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(*missing)
    config, notes = resolved("cuda")
    assert config.train.compile == "false"
    (note,) = (note for note in notes if note.startswith("train.compile is false"))
    assert reason in note
    assert not resolved("cuda", "train.compile=false")[1]
    assert resolved("cuda", "train.compile=true")[0].train.compile == "true"


@pytest.mark.parametrize(
    ("words", "copies"), [([], 2), (["parallel.data=zero3"], 0.5), (["parallel.tensor=2"], 1)]
)
def test_weights_of_all_ranks_of_a_host_must_fit_into_its_memory(monkeypatch, words, copies):
    config = compose(["model=tiny", *words])
    shape = config.shape_with(99)
    needed = int(copies * 4 * model_parameters(shape))
    world = SimpleNamespace(
        rank=1, size=4, device=torch.device("cpu"), gather=lambda name: [name, name, "other", "other"]
    )
    for free, error in ((needed - 1, ValueError), (needed, AttributeError)):  # the next thing is a mesh
        monkeypatch.setattr("multipack.training.blueprint.available_memory", lambda free=free: free)
        with pytest.raises(
            error, match="the 2 of 4 ranks on this host" if error is ValueError else "data_size"
        ):
            open_engine(config, None, shape, None, SimpleNamespace(world=world), torch.float32)


def test_packs_have_the_shape_that_the_run_chose(trainer):
    run = trainer("train.dtype=bf16")
    assert run.config.train.fixed_shape == "true"
    assert {batch.num_slots for batch in next(iter(run.feed)).micro_batches} == {run.config.plan.capacity}


def test_given_weights_have_their_own_learning_rate(resolved):
    start = "train.init_from=runs/a"
    for words, objective, lr in (
        ([], Objective, 2e-3),
        ([start], Objective, 2e-5),
        ([start], Preferences, 1e-6),
        ([start, "optimizer.lr=2e-3"], Preferences, 2e-3),
        (["optimizer.lr=1e-4"], Preferences, 1e-4),
        ([start, "optimizer.lr=0"], Objective, 0.0),
        (["optimizer.lr=-1"], Objective, 2e-3),
    ):
        config, _ = resolved("cpu", "train.dtype=fp32", *words, objective=objective)
        assert config.optimizer.lr == lr
        again = resolved("cpu", "train.dtype=fp32", f"optimizer.lr={config.optimizer.lr}", start)[
            0
        ]  # as a resumed run has it
        assert again.optimizer.lr == lr
    with pytest.raises(ValueError, match=r"optimizer\.min_lr=0\.0001 must not exceed optimizer\.lr=2e-05"):
        resolved("cpu", "train.dtype=fp32", start, "optimizer.min_lr=1e-4")


def test_the_header_states_what_the_run_does(trainer):
    run = trainer("train.steps=6", "optimizer.warmup_steps=20", "train.fixed_shape=true")
    rows = dict(header_rows(run))
    assert rows["learning rate"].endswith("0.0009 at step 6")
    assert rows["execution"].startswith("train.dtype=fp32 train.fixed_shape=true train.compile=false ")
    assert rows["parameters"].endswith(" in fp32")


def test_evaluations_longer_than_training_are_noted(trainer):
    quiet = trainer()
    assert not any("train.eval_packs" in note for note in quiet.notes)
    dear = trainer("data.validation=0.7", "plan.packs_per_step=1", "train.eval_every=1")
    (note,) = (note for note in dear.notes if "train.eval_packs" in note)
    assert f"as long as {dear.feeds.validation.steps // 3} steps" in note


def test_text_outside_of_a_chat_template_is_noted(trainer, chat_tokenizer, tmp_path):
    chat_tokenizer("<|im_start|>", "<|im_end|>").save(tmp_path / "tokenizer.json")
    words = ("tokenizer.kind=file", f"tokenizer.path={tmp_path}")
    assert not any("data.as_chat" in note for note in trainer(*words).notes)  # it has no template
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert any("data.as_chat=true here writes them" in note for note in trainer(*words).notes)
    chats = trainer(*words, "data.as_chat=true")
    assert not any("data.as_chat" in note for note in chats.notes)
    assert json.loads(chats.corpus.chat_template)["source"] == template


def test_one_process_offloads_to_its_host(finished, words, tmp_path, files, capsys):
    more = ["parallel.data=zero3", "parallel.offload=cpu", "train.steps=2"]
    train_module.train(compose([*words, *more, f"out={tmp_path / 'run'}"]))
    assert files(tmp_path / "run").losses == pytest.approx(files(finished).losses[:2], rel=1e-6)
    assert not torch.distributed.is_initialized()
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("offloaded to the host") == printed.count("no samples") == 1


def test_padding_is_not_measured_on_several_ranks_and_streams(trainer):
    run = trainer()
    run.world = World(size=2)
    assert train_module._compare_padding(run, None) is None
    run.world, run.feed = World(), SimpleNamespace(plan=None, close=run.feed.close)
    assert train_module._compare_padding(run, None) is None


def test_a_wrong_token_is_refused_on_the_host_with_its_documents(trainer, monkeypatch):
    monkeypatch.setattr(decoder, "check_tokens", lambda *_: None)  # as on a GPU
    run = trainer("train.prefetch=0")
    wrong = Document(np.full(9, 300, np.uint16), np.array([[0, 9]]))
    run.feed.loader.documents = defaultdict(lambda: wrong)
    with pytest.raises(ValueError, match="token 300 is outside the vocabulary of 257") as raised:
        next(iter(run.feed))
    assert "while making a batch of the documents" in raised.value.__notes__[0]

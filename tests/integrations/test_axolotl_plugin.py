"""Axolotl's plugin with a stand-in for Axolotl's plugin interface; `test_axolotl_trainer` has the real one."""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler

from multipack.integrations import axolotl, axolotl_sampler

pydantic = pytest.importorskip("pydantic")

PLACES = ("axolotl.core.trainers.base", "axolotl.utils.trainer", "axolotl.utils.data.streaming")


class Manager:
    """Axolotl's singleton, which holds the validated configuration."""

    cfg = None

    @staticmethod
    def get_instance():
        return Manager


class Flattening:
    """transformers' collator of `batch_flattening`."""

    def __call__(self, features):
        raise AssertionError


@pytest.fixture
def module(monkeypatch):
    """The plugin's module, imported beside a stand-in for Axolotl."""
    names = ["transformers", "axolotl", "axolotl.integrations", "axolotl.integrations.base", *PLACES]
    names += [
        "axolotl.core",
        "axolotl.core.trainers",
        "axolotl.utils",
        "axolotl.utils.data",
        "axolotl.utils.samplers",
    ]
    for name in names:
        stand_in = ModuleType(name)
        stand_in.__path__ = []
        monkeypatch.setitem(sys.modules, name, stand_in)
    for place in (*PLACES, "axolotl.utils.samplers"):
        sys.modules[place].MultipackBatchSampler = list
    sys.modules["axolotl.integrations.base"].BasePlugin = object
    sys.modules["transformers"].TrainerCallback = object
    sys.modules["transformers"].DataCollatorWithFlattening = Flattening
    sys.modules["axolotl.integrations.base"].PluginManager = Manager
    monkeypatch.setattr(Manager, "cfg", None)
    monkeypatch.delitem(sys.modules, "multipack.integrations.axolotl_plugin", raising=False)
    yield sys.modules[axolotl.MultipackPlugin.__module__]
    sys.modules.pop("multipack.integrations.axolotl_plugin", None)


def samplers():
    return [sys.modules[place].MultipackBatchSampler for place in PLACES]


GOOD = {"sample_packing": True}
LENGTHS = np.random.default_rng(0).integers(5, 100, 300)
COMMON = {"batch_size": 1, "batch_max_len": 128, "lengths": LENGTHS}


def test_the_sampler_is_replaced_and_put_back(module):
    plugin = module.MultipackPlugin()
    for undo in (plugin.on_config_validation_error, plugin.post_train_unload):
        plugin.register(GOOD)
        module.MultipackPlugin().register(GOOD)  # Axolotl makes and registers plugins once per configuration
        assert samplers() == [module.TrainerSampler, module.TrainerSampler, module.StreamSampler]
        undo({})
        assert samplers() == [list] * 3
    plugin.register(GOOD)
    plugin.register({"multipack": False})
    assert samplers() == [list] * 3
    assert not plugin.add_callbacks_post_trainer({"multipack": False}, None)
    del sys.modules["axolotl.utils.trainer"].MultipackBatchSampler
    with pytest.raises(RuntimeError, match=r"axolotl\.utils\.trainer has no MultipackBatchSampler"):
        plugin.register(GOOD)
    assert sys.modules[PLACES[0]].MultipackBatchSampler is list


def test_batches_are_whole_optimizer_steps(module, monkeypatch):
    """Two ranks, five accumulation steps, two bins: 20 bins a step; evaluation needs a batch for each rank only."""
    monkeypatch.setattr(axolotl_sampler, "world_size", lambda: 2)
    Manager.cfg = {"batch_size": 20, "micro_batch_size": 2, "gradient_accumulation_steps": 5}
    two = COMMON | {"batch_size": 2}
    train = module.TrainerSampler(RandomSampler(LENGTHS), **two)
    evaluation = module.TrainerSampler(SequentialSampler(LENGTHS), **two)
    assert (len(train) % 10, train.multiple_of, evaluation.multiple_of) == (0, 10, 2)
    assert len(evaluation) < len(train)
    Manager.cfg["curriculum_sampling"] = True
    assert module.TrainerSampler(SequentialSampler(LENGTHS), **two).multiple_of == 10
    assert module.StreamSampler(RandomSampler(LENGTHS), **COMMON).multiple_of == 1
    for sequential in (False, True):
        sampler = module.TrainerSampler(RandomSampler(LENGTHS), **two, sequential=sequential)
        batches = list(sampler)
        assert all(len(batch) == 2 and all(batch) for batch in batches)
        assert sorted(number for batch in batches for held in batch for number in held) == list(range(300))
        few = module.TrainerSampler(range(11), **two, sequential=sequential)
        assert len(few) % 2 == 0  # too few for an optimizer step: whole rounds of ranks
        assert sorted(number for batch in few for held in batch for number in held) == list(range(11))


def test_long_documents_follow_the_key(module):
    Manager.cfg = {"multipack_overlong": "error"}
    with pytest.raises(ValueError, match="document 0 has 129 tokens"):
        module.TrainerSampler(range(1), 1, 128, [129])


@pytest.mark.parametrize(
    "data",
    [
        GOOD | {"multipack": True, "multipack_overlong": "drop", "multipack_real_batches": True},
        {"sample_packing": False, "multipack": False, "dataloader_drop_last": True},
        GOOD | {"batch_flattening": "auto", "accelerator_config": {"split_batches": False}},
        {"batch_flattening": True, "dataloader_drop_last": True},
    ],
)
def test_settings_that_are_taken(module, data):
    module.MultipackPlugin().register(data)
    is_on = data.get("multipack", True)
    assert samplers()[0] is (module.TrainerSampler if is_on else list)
    assert module.MultipackArgs(**{name: value for name, value in data.items() if value is not None})
    assert module.MultipackPlugin().get_input_args().endswith(".axolotl_plugin.MultipackArgs")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "packs documents: set sample_packing: true"),
        (GOOD | {"batch_flattening": True}, "remove batch_flattening"),
        (GOOD | {"multipack_overlng": "drop"}, "did you mean multipack_overlong"),
        (GOOD | {"multipack_overlong": "cut"}, "multipack_overlong='cut' is unknown; choose one of"),
        (GOOD | {"multipack": "yes"}, "multipack must be true or false, got 'yes'"),
        (GOOD | {"multipack_probe": 1}, "multipack_probe must be true or false, got 1"),
        (GOOD | {"sample_packing_eff_est": 0.9}, "sample_packing_eff_est=0.9 replaces the exact number"),
        (GOOD | {"dataloader_drop_last": True}, "dataloader_drop_last=True takes a step"),
        (GOOD | {"use_pose": True}, "use_pose=True leaves gaps"),
        (GOOD | {"accelerator_config": {"split_batches": True}}, r"accelerator_config\.split_batches=True"),
        (GOOD | {"accelerator_config": {"use_seedable_sampler": False}}, "another order"),
    ],
)
def test_settings_that_are_refused(module, data, message):
    with pytest.raises(ValueError, match=message) as caught:
        module.MultipackPlugin().register(data)
    assert "\n" not in str(caught.value)
    assert samplers() == [list] * 3  # Axolotl's own stays


class Loader:
    """A data loader of two ranks, as accelerate makes it."""

    def __init__(self, sampler):
        self.batch_sampler = SimpleNamespace(batch_sampler=sampler)
        self.sampler = sampler

    def __len__(self):
        return len(self.sampler) // 2


def test_a_run_checks_its_sampler_and_begins_epochs(module, monkeypatch):
    monkeypatch.setattr(axolotl_sampler, "world_size", lambda: 2)
    plugin = module.MultipackPlugin()
    plugin.register(GOOD)
    (check,) = plugin.add_callbacks_post_trainer(GOOD, None)
    assert not plugin.add_callbacks_post_trainer(GOOD | {"streaming": True}, None)
    assert not plugin.add_callbacks_post_trainer({"batch_flattening": True}, None)
    args = SimpleNamespace(gradient_accumulation_steps=1, num_train_epochs=2.0)
    loader = Loader(module.TrainerSampler(RandomSampler(LENGTHS), **COMMON))
    state = SimpleNamespace(max_steps=2 * len(loader), is_world_process_zero=True, epoch=1.5)
    check.on_train_begin(args, state, None, train_dataloader=loader)
    check.on_epoch_begin(args, state, None)
    assert loader.sampler.epoch == 1
    state.max_steps -= 1
    with pytest.raises(RuntimeError, match=r"counted \d+ steps, but 2 epochs of its trainer have \d+"):
        check.on_train_begin(args, state, None, train_dataloader=loader)
    (cut,) = plugin.add_callbacks_post_trainer(GOOD | {"max_steps": 3}, None)
    cut.on_train_begin(args, state, None, train_dataloader=loader)
    other = SimpleNamespace(batch_sampler=SequentialSampler(LENGTHS))
    with pytest.raises(RuntimeError, match="reads SequentialSampler instead of multipack's sampler"):
        check.on_train_begin(args, state, None, train_dataloader=other)


def test_no_target_belongs_to_another_document(module):
    plugin, batch = module.MultipackPlugin(), {}
    trainer = SimpleNamespace(data_collator=lambda features: dict(batch), eval_data_collator=None, model=None)
    plugin.register(GOOD)
    plugin.post_trainer_create(GOOD | {"streaming": True}, trainer)
    assert trainer.data_collator([]) == {}
    plugin.post_trainer_create(GOOD | {"multipack_probe": False}, trainer)
    assert trainer.data_collator([]) == {}
    batch["labels"] = torch.tensor([[5, 6, 7, 8, -100]])
    batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 0]])
    assert trainer.data_collator([])["labels"].tolist() == [[-100, 6, 7, -100, -100]]
    assert trainer.eval_data_collator is None


class Model(torch.nn.Module):
    """Sums embeddings, in documents that `position_ids` divide or over the whole row."""

    def __init__(self, has_documents):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(64, 8)
        self.has_documents, self.config = has_documents, SimpleNamespace(model_type="sums", vocab_size=64)

    def forward(self, input_ids, position_ids=None, attention_mask=None):
        seen = torch.ones(2 * input_ids.shape[-1:], dtype=torch.bool).tril()
        if self.has_documents and position_ids is not None and attention_mask is None:
            document = (position_ids == 0).cumsum(-1)
            seen = seen & (document[..., None] == document[..., None, :])
        return seen.float() @ self.embedding(input_ids)


class Rows:
    """Like Axolotl's collator of bins, without padding."""

    def __call__(self, features):
        bins = features if isinstance(features[0], list) else [features]
        width = max(sum(len(row["input_ids"]) for row in rows) for rows in bins)
        joined = [{name: [item for row in rows for item in row[name]] for name in rows[0]} for rows in bins]
        return {
            name: torch.tensor([row[name] + [0] * (width - len(row[name])) for row in joined])
            for name in joined[0]
        }


def trainer_of(
    model, columns=("input_ids", "labels", "attention_mask", "position_ids"), collate=Rows, **args
):
    args = {"multipack_real_batches": True, "per_device_train_batch_size": 2} | args
    args = {"sample_packing": True, "sample_packing_drop_attention_mask": True} | args
    named = {"data_collator": collate(), "train_dataset": SimpleNamespace(column_names=list(columns))}
    named |= {"place_model_on_device": True, "accelerator": SimpleNamespace(autocast=nullcontext)}
    return SimpleNamespace(model=model, args=SimpleNamespace(**args), **named)


def test_a_model_that_mixes_documents_is_refused(module):
    plugin = module.MultipackPlugin()
    for rows in (True, False):
        plugin.post_trainer_create(GOOD, trainer_of(Model(True), multipack_real_batches=rows))
        with pytest.raises(ValueError, match="packed documents are not isolated: document") as caught:
            plugin.post_trainer_create(GOOD, trainer_of(Model(False), multipack_real_batches=rows))
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"leak: documents of a row.*no attention_mask"):
        plugin.post_trainer_create(GOOD, trainer_of(Model(True), sample_packing_drop_attention_mask=False))
    sharded = trainer_of(Model(False))
    sharded.place_model_on_device = False
    plugin.post_trainer_create(GOOD, sharded)
    plugin.post_trainer_create(GOOD | {"multipack_probe": False}, trainer_of(Model(False)))


def test_documents_that_change_the_rotation_of_their_row_are_refused(module):
    plugin, trainer = module.MultipackPlugin(), trainer_of(Model(True))
    trainer.model.config = {"rope_scaling": {"type": "dynamic"}, "max_position_embeddings": 6}
    trainer.train_dataset = [{"input_ids": [1] * 6}]
    plugin.post_trainer_create(GOOD | {"multipack_probe": False}, trainer)
    trainer.eval_dataset = [{"input_ids": [1] * 7}]
    with pytest.raises(ValueError, match=r"eval_dataset: document 0 has 7 tokens.*rope_type=dynamic"):
        plugin.post_trainer_create(GOOD, trainer)


def test_batch_flattening_has_the_collator_of_packs(module):
    plugin, settings = module.MultipackPlugin(), {"batch_flattening": True}
    trainer = trainer_of(Model(True), ["input_ids", "labels"], Flattening, sample_packing=False)
    plugin.post_trainer_create(settings | {"multipack_probe": False}, trainer)
    assert trainer.data_collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])["cu_seq_lens_q"][1] == 3
    with pytest.raises(ValueError, match=r"flattens nothing here.*set sample_packing: true"):
        plugin.post_trainer_create({"batch_flattening": False}, trainer_of(Model(True)))


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'Plugin'"):
        axolotl.Plugin  # noqa: B018

"""PackedTrainer: what it trains, and settings under which packs would train something else, refused in one line."""

import logging
import shutil
from itertools import pairwise

import pytest
import torch
from torch.utils.data import IterableDataset

pytest.importorskip("accelerate", reason="accelerate is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from multipack.integrations import collator as collators  # noqa: E402
from multipack.integrations.collator import PackedDataCollator, makes_document_masks, windows_of  # noqa: E402
from multipack.integrations.trainer_checks import check_host  # noqa: E402
from multipack.integrations.transformers import PackedTrainer, PackedTrainerMixin  # noqa: E402

COLLATOR = PackedDataCollator("flattened" if makes_document_masks() else "4d_mask", window=None)
"""What this version of transformers reads."""
ROWS = [{"input_ids": list(range(1, count))} for count in (3, 9, 5, 7)]
ALPHA, WIDTH = 5.0, 16


class Stream(IterableDataset):
    """Documents without an order that can be chosen."""

    def __iter__(self):
        return iter(ROWS)


def documents(*lengths, labels=None):
    rows = [{"input_ids": list(range(1, length + 1))} for length in lengths]
    return [row | ({} if labels is None else {"labels": [labels] * len(row["input_ids"])}) for row in rows]


def trainer(
    folder, data=ROWS, collator=COLLATOR, model="llama", capacity=64, rotary=None, sft=False, **settings
):
    sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"sliding_window": 4} if model == "mistral" else {}
    config = transformers.AutoConfig.for_model(
        model, vocab_size=64, num_key_value_heads=2, **sizes, **rotary or {}, pad_token_id=0
    )
    if missing := sorted(settings.keys() - transformers.TrainingArguments.__dataclass_fields__.keys()):
        pytest.skip(f"this transformers has no {', '.join(missing)}")
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config)
    named = {"report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    named |= {"per_device_train_batch_size": 1, **settings}
    given = {"train_dataset": data, "eval_dataset": data, "capacity": capacity}
    if not sft:
        return PackedTrainer(made, transformers.TrainingArguments(str(folder), **named), collator, **given)
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    import tokenizers

    from multipack.data.text.tokenizer import byte_tokenizer
    from multipack.integrations.trl import PackedSFTTrainer

    given |= dict.fromkeys(("train_dataset", "eval_dataset"), datasets.Dataset.from_list(data))
    named |= {"bf16": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(byte_tokenizer().to_json()),
        pad_token="a",
        eos_token="b",
    )
    return PackedSFTTrainer(
        made, trl.SFTConfig(str(folder), **named), collator, processing_class=tokens, **given
    )


def noises(host):
    """Noise on the embeddings of the documents of each pass, which is filled as passes run."""
    found, embedding = [], host.model.get_input_embeddings()

    def record(model, args, given):
        model.ids, model.positions = given["input_ids"], given["position_ids"]

    def compare(layer, args):
        ids, positions = host.model.model.ids[0], host.model.model.positions[0]
        noise = (args[0][0] - torch.nn.functional.embedding(ids, embedding.weight)).detach()
        found.append(noise.split(lengths_of(positions)))

    host.model.model.register_forward_pre_hook(record, with_kwargs=True)
    host.model.model.layers[0].register_forward_pre_hook(compare)
    return found


def lengths_of(positions):
    starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
    return [stop - start for start, stop in pairwise(starts)]


@pytest.mark.parametrize("sft", [False, True], ids=["transformers", "trl"])
def test_noise_of_embeddings_has_the_size_of_each_document(tmp_path, sft):
    lengths = (5, 40, 12)
    host = trainer(tmp_path, documents(*lengths), sft=sft, neftune_noise_alpha=ALPHA, max_steps=1)
    found = noises(host)
    host.train()
    (row,) = found
    assert sorted(len(each) for each in row) == sorted(lengths)
    for noise in row:
        size = ALPHA / (len(noise) * WIDTH) ** 0.5
        assert 0.9 * size < noise.abs().max() < 1.001 * size
        assert noise.std() == pytest.approx(size / 3**0.5, rel=0.2)
    host.evaluate()
    assert all(noise.abs().max() == 0 for noise in found[-1])
    host.model.train()
    host.model(**COLLATOR(documents(5, 4)))  # training is over
    assert all(noise.abs().max() < 1e-6 for noise in found[-1])


def test_data_without_any_target_is_refused(tmp_path):
    host = trainer(tmp_path, documents(5, 7, labels=-100))
    with pytest.raises(ValueError, match=r"none of the 2 documents .* has a target.*labels"):
        host.train()
    host.train_dataset = [*documents(5, 7, labels=-100), *documents(1), *documents(9)]
    assert host.get_train_dataloader()


@pytest.mark.parametrize("column", ["labels", "completion_mask", "attention_mask"])
def test_targets_of_arrow_are_found(tmp_path, column):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    values = {"labels": -100, "completion_mask": 0, "attention_mask": 0}
    rows = [row | {column: [values[column]] * len(row["input_ids"])} for row in documents(5, 7)]
    if column == "attention_mask":
        rows = [row | {column: [1, *row[column][1:]]} for row in rows]
    host = trainer(tmp_path, datasets.Dataset.from_list(rows))
    with pytest.raises(ValueError, match=r"none of the 2 documents .* has a target"):
        host.get_train_dataloader()


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    host = trainer(tmp_path, [*documents(5), {"input_ids": [1, 64]}])
    message = r"document \d of the batch: token 64 is outside the vocabulary of 64"
    with pytest.raises(ValueError, match=message):
        host.train()


class Read(list):
    """Documents, and how often one was read."""

    count = 0

    def __getitem__(self, number):
        self.count += 1
        return super().__getitem__(number)


def test_lengths_are_read_once_and_again_after_a_change(tmp_path):
    data = Read(ROWS)
    host = trainer(tmp_path, data=data)
    for _ in range(2):
        host.get_eval_dataloader()
        assert data.count == len(ROWS)
    for change in (lambda: None, lambda: data.extend(ROWS), lambda: data.__delitem__(slice(1, None))):
        change()
        read = sorted(number for pack in host.get_train_dataloader().batch_sampler for number in pack)
        assert read == list(range(len(data)))
    with pytest.raises(ValueError, match="there is no eval_dataset 'x': give the trainer a mapping"):
        host.get_eval_dataloader("x")


def test_steps_that_are_not_full_are_left_out(tmp_path):
    data = documents(60, 50, 40)
    settings = {"gradient_accumulation_steps": 2}
    kept, dropped = (
        trainer(tmp_path, data, dataloader_drop_last=drop, **settings).get_train_dataloader()
        for drop in (False, True)
    )
    assert [sum(map(len, loader.batch_sampler)) for loader in (kept, dropped)] == [3, 2]
    assert len(dropped) == 2


def test_a_run_resumes_from_the_last_checkpoint_that_is_whole(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = trainer(tmp_path, documents(60, 50, 40), **settings)
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text('{"global_st')
    again = trainer(tmp_path, documents(60, 50, 40), **settings)
    with pytest.raises(ValueError, match="checkpoint-2 has an incomplete trainer_state"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with caplog.at_level(logging.WARNING):
        again.train(resume_from_checkpoint=True)
    assert "checkpoint-2 is incomplete" in caplog.text
    assert again.state.global_step == 3
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    for state in tmp_path.glob("checkpoint-*/trainer_state.json"):
        state.write_text("")
    with pytest.raises(ValueError, match=r"checkpoint-\d has an incomplete trainer_state.json"):
        again.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"capacity": 0}, "capacity must be a whole number of at least 1"),
        ({"collator": PackedDataCollator("padded")}, "returns='padded' makes padded rows"),
        (
            {"collator": transformers.DataCollatorWithFlattening()},
            "leave it out, or give a PackedDataCollator",
        ),
        ({"use_cache": True}, "use_cache=True makes models ignore document boundaries: set it to False"),
        ({"train_sampling_strategy": "group_by_length"}, "leave out train_sampling_strategy"),
        ({"train_sampling_strategy": "sequential"}, "plan_options={'order': 'given'}"),
        ({"ignore_data_skip": True}, "first documents of an interrupted epoch again: leave it out"),
        (
            {"collator": PackedDataCollator("4d_mask", window=None), "model": "mistral"},
            r"PackedDataCollator\(window=4\)|takes no num_items",
        ),
    ],
)
def test_settings_that_are_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message) as caught:
        trainer(tmp_path, **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            [*ROWS, {"input_ids": [1] * 40}],
            r"document 4 has 40 tokens.*per_device_train_batch_size=2.*capacity=20",
        ),
        (iter(ROWS), "load it without streaming"),
        (Stream(), "Stream has no length.*load it without streaming"),
        (None, "train_dataset"),
    ],
)
def test_data_that_is_refused(tmp_path, data, message):
    host = trainer(tmp_path, capacity=16, per_device_train_batch_size=2)
    host.train_dataset = data
    with pytest.raises(ValueError, match=message) as caught:
        host.get_train_dataloader()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize(
    "rotary",
    [
        {"max_position_embeddings": 6, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
        {
            "max_position_embeddings": 32,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [3.0] * 4,
                "original_max_position_embeddings": 6,
            },
        },
    ],
)
def test_documents_that_change_the_rotation_of_their_row_are_refused(tmp_path, rotary, evaluated):
    short = [row for row in ROWS if len(row["input_ids"]) <= 6]
    host = trainer(tmp_path, rotary=rotary, data=short)
    assert len(host.get_train_dataloader()) == 1
    host.eval_dataset = host.train_dataset = ROWS
    with pytest.raises(ValueError, match=r"document 1 has 8 tokens.*rope_type=\w+.*_embeddings=6"):
        (host.get_eval_dataloader if evaluated else host.get_train_dataloader)()


def test_devices_that_divide_a_row_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match=r"one process with 2 GPUs.*torchrun --nproc-per-node 2"):
        trainer(tmp_path)


def test_ranks_that_weigh_equally_are_refused(tmp_path, monkeypatch):
    assert trainer(tmp_path, average_tokens_across_devices=False)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match=r"average_tokens_across_devices=False.*set it to True"):
        trainer(tmp_path, average_tokens_across_devices=False)


@pytest.mark.parametrize("axis", ["tp_size", "cp_size"])
def test_ranks_that_share_a_batch_are_refused(tmp_path, monkeypatch, axis):
    accelerate = pytest.importorskip("accelerate", "1.10", reason="accelerate has no parallelism_config")
    host = trainer(tmp_path)  # one process, which cannot be divided: the setting comes afterwards
    divided = accelerate.ParallelismConfig(**{axis: 2})
    monkeypatch.setattr(accelerate.Accelerator, "parallelism_config", divided)
    with pytest.raises(ValueError, match=r"2 ranks share a batch.*use data parallelism"):
        check_host(host)


def test_losses_that_are_means_over_micro_batches_are_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(transformers.LlamaForCausalLM, "accepts_loss_kwargs", False, raising=False)
        with pytest.raises(
            ValueError, match=r"LlamaForCausalLM takes no num_items_in_batch.*compute_loss_func"
        ):
            trainer(tmp_path)
    assert trainer(tmp_path, label_smoothing_factor=0.1)

    class OldSmoother(transformers.trainer_pt_utils.LabelSmoother):
        def __call__(self, model_output, labels, shift_labels=False):
            """As before transformers 5.15."""

    monkeypatch.setattr(transformers.trainer, "LabelSmoother", OldSmoother)
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1.*update transformers, or set it to 0"):
        trainer(tmp_path, label_smoothing_factor=0.1)


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_labels_that_are_not_the_next_tokens_are_refused(tmp_path, task):
    host = trainer(tmp_path)
    host.model = getattr(transformers, f"LlamaFor{task}")(host.model.config)
    with pytest.raises(ValueError, match=r"does not predict the next token.*use a causal language model"):
        check_host(host)


@pytest.mark.parametrize("kind", ["PromptTuning", "PrefixTuning"])
def test_virtual_tokens_before_a_row_are_refused(tmp_path, kind):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    host = trainer(tmp_path)
    adapter = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=2)
    host.model = peft.get_peft_model(host.model, adapter)
    with pytest.raises(ValueError, match=rf"{kind}Config puts virtual tokens before a row.*use LoRA"):
        check_host(host)


def test_a_model_that_mixes_documents_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"packed documents are not isolated|takes no num_items_in_batch"):
        trainer(tmp_path, model="mamba", capacity=64)


@pytest.mark.skipif(not makes_document_masks(), reason="the next test has such a version")
def test_versions_without_masks_of_documents_are_named(tmp_path, monkeypatch):
    """Before 4.53, transformers makes no mask from positions."""
    monkeypatch.setattr(collators, "makes_document_masks", lambda: False)
    with pytest.raises(ValueError, match=r"since transformers 4\.53: pip install"):
        windows_of(transformers.MistralConfig(sliding_window=4))
    assert windows_of(transformers.LlamaConfig()) is None


@pytest.mark.skipif(makes_document_masks(), reason="transformers makes masks of documents")
def test_rows_without_masks_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"not isolated.*transformers >= 4\.53.*4d_mask"):
        trainer(tmp_path, collator=PackedDataCollator())


@pytest.mark.skipif(not makes_document_masks(), reason="windows of layers are known since transformers 4.53")
def test_windows_of_the_model_are_accepted(tmp_path):
    assert trainer(tmp_path, collator=PackedDataCollator("4d_mask", window=4), model="mistral")


@pytest.mark.slow
def test_trainers_of_pairs_and_rollouts_are_refused():
    trl = pytest.importorskip("trl", reason="TRL is not installed")

    for host in (trl.DPOTrainer, trl.GRPOTrainer):
        made = type("Mine", (PackedTrainerMixin, host), {})
        with pytest.raises(ValueError, match=r"Mine trains on pairs or rollouts.*use PackedSFTTrainer"):
            made(None, None, capacity=16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packing", "eval_packing", "padding_free"])
def test_packing_of_trl_is_refused(tmp_path, name):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from multipack.integrations.trl import PackedSFTTrainer

    given = {name: True, "max_length": None} if name == "padding_free" else {name: True}
    with pytest.raises(ValueError, match=f"{name}=True is TRL's own way to pack.*leave it out"):
        PackedSFTTrainer(None, trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, **given))
    with pytest.raises(ValueError, match="give capacity, or SFTConfig"):
        PackedSFTTrainer(None, trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, max_length=None))

"""PackedTrainer: noise of documents, documents without targets, and checkpoints that a kill left incomplete."""

import logging
import shutil
from itertools import pairwise

import pytest
import tokenizers
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from multipack.data.text.tokenizer import byte_tokenizer  # noqa: E402
from multipack.integrations.collator import PackedDataCollator, makes_document_masks  # noqa: E402
from multipack.integrations.transformers import PackedTrainer  # noqa: E402

COLLATOR = PackedDataCollator("flattened" if makes_document_masks() else "4d_mask", window=None)
ALPHA, WIDTH = 5.0, 16


def documents(*lengths, labels=None):
    rows = [{"input_ids": list(range(1, length + 1))} for length in lengths]
    return [row | ({} if labels is None else {"labels": [labels] * len(row["input_ids"])}) for row in rows]


def trainer(folder, data, sft=False, **settings):
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    named = {"report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    model = transformers.LlamaForCausalLM(config)
    given = {"train_dataset": data, "eval_dataset": data, "capacity": 64}
    named |= {"per_device_train_batch_size": 1, **settings}
    if not sft:
        return PackedTrainer(model, transformers.TrainingArguments(str(folder), **named), COLLATOR, **given)
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from multipack.integrations.trl import PackedSFTTrainer

    given |= dict.fromkeys(("train_dataset", "eval_dataset"), datasets.Dataset.from_list(data))
    named |= {"bf16": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(byte_tokenizer().to_json()),
        pad_token="a",
        eos_token="b",
    )
    return PackedSFTTrainer(
        model, trl.SFTConfig(str(folder), **named), COLLATOR, processing_class=tokens, **given
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
    host = trainer(tmp_path, documents(*lengths), sft, neftune_noise_alpha=ALPHA, max_steps=1)
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
    with pytest.raises(ValueError, match="token 64 is outside the vocabulary of 64"):
        host.train()


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

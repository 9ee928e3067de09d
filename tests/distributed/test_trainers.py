"""transformers' Trainer and TRL's SFTTrainer on packs, on one and two processes: equal to every document alone."""

import pytest
from hosts import CASES, RATE, ROW, Texts, alone_loss, check_ranks, collator, numbers_of, tiny_llama, weights

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")


def trainer_of(host, folder, lora=False, **settings):
    """A trainer of a host that records the documents of every row, and its arguments."""
    named = {
        "output_dir": folder,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0,
        "report_to": "none",
        "average_tokens_across_devices": True,  # not the default in 4.53 and before
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1000,
    }
    texts = Texts()
    if host == "trl":
        import datasets
        from trl import SFTConfig

        from multipack.integrations.trl import PackedSFTTrainer as Packed

        data = datasets.Dataset.from_list(texts.rows)
        args = SFTConfig(
            **named | {"max_length": ROW, "dataset_kwargs": {"skip_prepare_dataset": True}} | settings
        )
        extra = {"processing_class": tokenizer()}
    else:
        from transformers import TrainingArguments

        from multipack.integrations.transformers import PackedTrainer as Packed

        data, args, extra = texts, TrainingArguments(**named | settings), {"capacity": ROW}

    class Recorded(Packed):
        rows = ()

        def training_step(self, model, inputs, *rest, **more):
            self.rows = [*self.rows, numbers_of(inputs)]
            return super().training_step(model, inputs, *rest, **more)

    return Recorded(tiny_llama(lora), args, collator(), train_dataset=data, eval_dataset=data, **extra)


def tokenizer():
    """A tokenizer of single characters, which TRL asks for."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {chr(32 + number): number for number in range(90)} | {"<pad>": 90, "<eos>": 91}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "<pad>")), pad_token="<pad>", eos_token="<eos>"
    )


HOSTS = ["transformers", pytest.param("trl", marks=pytest.mark.slow)]


def case_resumed(world, host, accumulation, lora, folder):
    """Rows and weights of a run, and of one that stops in the middle of epoch 1 and is resumed."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == args.save_steps

    accumulated = {"gradient_accumulation_steps": accumulation}
    whole = trainer_of(host, f"{folder}/whole", lora, **accumulated)
    steps = len(whole.get_train_dataloader()) // accumulation
    whole.train()
    settings = accumulated | {"save_strategy": "steps", "save_steps": steps + steps // 2}
    cut = trainer_of(host, folder, lora, **settings)
    cut.add_callback(Stop())
    cut.train()
    resumed = trainer_of(host, folder, lora, **settings)
    resumed.train(resume_from_checkpoint=True)
    other = trainer_of(host, folder, lora, **settings | {"seed": 5})
    with pytest.raises(ValueError, match="data_seed=42, now 5"):
        other.train(resume_from_checkpoint=True)
    other = trainer_of(host, folder, lora, **settings | {"gradient_accumulation_steps": 3 - accumulation})
    with pytest.raises(ValueError, match=r"options \(.*packs_per_step from"):
        other.train(resume_from_checkpoint=True)
    return {
        "rows": [whole.rows, [*cut.rows, *resumed.rows]],
        "steps": [steps, cut.state.global_step, resumed.state.global_step],
        "trained": [whole.state.global_step, whole.state.max_steps],
        "weights": [weights(whole.model), weights(resumed.model)],
    }


@pytest.mark.parametrize(("processes", "accumulation", "lora"), CASES)
@pytest.mark.parametrize("host", HOSTS)
def test_training_equals_every_document_alone_also_when_resumed(
    pools, tmp_path, host, lora, accumulation, processes
):
    if lora:
        pytest.importorskip("peft", reason="peft is not installed")
    found = pools(processes).run(case_resumed, host, accumulation, lora, str(tmp_path))
    steps = check_ranks(found, accumulation, lora)
    for rank in found:
        assert rank["trained"] == [steps] * 2
        epoch, stopped, end = rank["steps"]
        assert epoch < stopped < end == 2 * epoch


def case_evaluated(world, host, folder):
    """Evaluation of the first weights, and predictions."""
    trainer = trainer_of(host, folder)
    found = trainer.evaluate()
    few = Texts(3) if host == "transformers" else trainer.eval_dataset.select(range(3))
    shape = trainer.predict(few).predictions.shape
    return found["eval_loss"], trainer.evaluate(few)["eval_loss"], shape


@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("host", HOSTS)
def test_evaluation_is_the_mean_over_all_targets(pools, tmp_path, host, processes):
    model = tiny_llama().eval()
    for loss, loss_of_few, shape in pools(processes).run(case_evaluated, host, str(tmp_path)):
        for count, found in ((40, loss), (3, loss_of_few)):
            rows = Texts().rows[:count]
            targets = sum(label != -100 for row in rows for label in row["labels"][1:])
            expected = sum(alone_loss(model, row).item() for row in rows) / targets
            assert found == pytest.approx(expected, abs=1e-6)
        assert shape[0] == 3

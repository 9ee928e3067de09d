"""PackedTrainer and PackedSFTTrainer: arguments of their hosts."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any
from unittest.mock import PropertyMock, patch

import transformers

from host_runs import tokenizer_of
from multipack.integrations.attention_interface import register
from multipack.integrations.collator import PackedDataCollator
from multipack.models.tiny_models import tiny_model
from support_tables.table import ABSENT, Table, answer, unless_run

ROWS = [{"input_ids": list(range(5, 5 + length))} for length in (3, 9, 5, 7, 8, 4, 6, 10)]
CAPACITY = 16
SILENT = {"report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True}


def stream() -> Any:
    """Documents that can be read in their order only."""
    import datasets

    return datasets.Dataset.from_list(ROWS).to_iterable_dataset()


def make_model(kind: str = "llama", attention: str = "sdpa", adapter: str = "", task: str = "") -> Any:
    """A tiny model of an architecture, or of Llama for another task; with an adapter of peft if asked."""
    register()
    model = tiny_model(transformers.CONFIG_MAPPING[kind](), "eager" if kind == "mamba" else attention)
    if task:
        return getattr(transformers, f"LlamaFor{task}")(model.config)
    if adapter:
        import peft

        options = {"num_virtual_tokens": 2} if adapter == "PromptTuning" else {"target_modules": ["q_proj"]}
        made = getattr(peft, f"{adapter}Config")(task_type="CAUSAL_LM", **options)
        return peft.get_peft_model(model, made)
    return model


def make_trainer(host: str, model: Any, data: Any, collator: Any, settings: dict[str, Any]) -> Any:
    """A PackedTrainer, or a PackedSFTTrainer on the same documents."""
    data = data() if callable(data) else data
    named = {"output_dir": tempfile.gettempdir(), "max_steps": 1, "per_device_train_batch_size": 1}
    named |= SILENT | settings
    if host == "transformers":
        from multipack.integrations.transformers import PackedTrainer

        args = transformers.TrainingArguments(**named)
        return PackedTrainer(model, args, collator, train_dataset=data, capacity=CAPACITY)
    import datasets
    import trl

    from multipack.integrations.trl import PackedSFTTrainer

    if host == "dpo":
        from multipack.integrations.transformers import PackedTrainerMixin

        class Pairs(PackedTrainerMixin, trl.DPOTrainer):  # type: ignore[misc,name-defined]
            """TRL's trainer of preference pairs."""

        return Pairs(model, trl.DPOConfig(**named), train_dataset=data, capacity=CAPACITY)
    named = {"max_length": CAPACITY, "dataset_kwargs": {"skip_prepare_dataset": True}} | named
    if isinstance(data, list):
        data = datasets.Dataset.from_list(data)
    return PackedSFTTrainer(
        model, trl.SFTConfig(**named), collator, train_dataset=data, processing_class=tokenizer_of(64)
    )


@contextmanager
def as_seen_by(properties: dict[str, int]) -> Iterator[None]:
    """A machine with other processes or devices, as TrainingArguments describes it."""
    with ExitStack() as stack:
        for name, value in properties.items():
            seen = patch.object(transformers.TrainingArguments, name, PropertyMock(return_value=value))
            stack.enter_context(seen)
        yield


def train(
    host: str,
    settings: dict[str, Any],
    *,
    data: Any = ROWS,
    collator: Any = None,
    machine: dict[str, int] | None = None,
    divided: str = "",
    call: str = "train",
    **model: Any,
) -> None:
    """Make a trainer and run a step of it; with other ranks or a compiler, only its first batch is read.

    Raises:
        ValueError: the trainer refuses it.
    """
    with as_seen_by(machine or {}), redirect_stdout(io.StringIO()):
        trainer = make_trainer(host, make_model(**model), data, collator, settings)
        if divided:
            import accelerate

            from multipack.integrations.trainer_checks import check_host

            axes = accelerate.ParallelismConfig(**{divided: 2})
            with patch.object(accelerate.Accelerator, "parallelism_config", axes):
                check_host(trainer)
        elif machine or settings.get("torch_compile"):
            next(iter(trainer.get_train_dataloader()))
        elif call == "train":
            trainer.train()
        else:
            getattr(trainer, call)(trainer.train_dataset)


PAIRS = "preference pairs: `class Mine(PackedTrainerMixin, DPOTrainer)`"
TWO_RANKS = {"world_size": 2}
PLACED = {"place_model_on_device": False}
"""What a trainer sees of FSDP and DeepSpeed, which place the model themselves."""
ON_RANKS = "2 processes (DDP)"
"""The row that `tests/distributed/test_trainers.py` runs on two processes."""
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "`gradient_accumulation_steps=2`": ({"gradient_accumulation_steps": 2}, {}),
    ON_RANKS: ({}, {"machine": TWO_RANKS}),
    "2 processes, `average_tokens_across_devices=False`": (
        {"average_tokens_across_devices": False},
        {"machine": TWO_RANKS},
    ),
    "1 process with 2 GPUs (DataParallel)": ({}, {"machine": {"n_gpu": 2}}),
    "FSDP (`fsdp`, `fsdp_config`)": ({}, {"machine": PLACED}),
    "DeepSpeed (`deepspeed`)": ({}, {"machine": PLACED}),
    "tensor parallelism, `ParallelismConfig(tp_size=2)`": ({}, {"divided": "tp_size"}),
    "context parallelism, `ParallelismConfig(cp_size=2)`": ({}, {"divided": "cp_size"}),
    "LoRA (peft)": ({}, {"adapter": "Lora"}),
    "prompt tuning (peft)": ({}, {"adapter": "PromptTuning"}),
    "`bf16=True`": ({"bf16": True}, {}),
    "`gradient_checkpointing=True`": ({"gradient_checkpointing": True}, {}),
    "`torch_compile=True`": ({"torch_compile": True}, {}),
    "`label_smoothing_factor=0.1`": ({"label_smoothing_factor": 0.1}, {}),
    "`auto_find_batch_size=True`": ({"auto_find_batch_size": True}, {}),
    "`dataloader_num_workers=2`": ({"dataloader_num_workers": 2}, {}),
    "`dataloader_drop_last=True`": ({"dataloader_drop_last": True}, {}),
    "`accelerator_config={'dispatch_batches': True}`": (
        {"accelerator_config": {"dispatch_batches": True}},
        {},
    ),
    "`accelerator_config={'split_batches': True}`": ({"accelerator_config": {"split_batches": True}}, {}),
    "`evaluate()`": ({}, {"call": "evaluate"}),
    "`predict()`": ({}, {"call": "predict"}),
    "`train_sampling_strategy='group_by_length'`": ({"train_sampling_strategy": "group_by_length"}, {}),
    "`use_cache=True`": ({"use_cache": True}, {}),
    "`ignore_data_skip=True`": ({"ignore_data_skip": True}, {}),
    "`packing=True`": ({"packing": True}, {}),
    "`padding_free=True`": ({"padding_free": True}, {}),
    "`loss_type='dft'`": ({"loss_type": "dft"}, {}),
    PAIRS: ({}, {}),
    "an `IterableDataset`": ({}, {"data": stream}),
    "a document longer than a pack": ({}, {"data": [*ROWS, {"input_ids": [5] * 40}]}),
    "`DataCollatorWithFlattening`": ({}, {"collator": transformers.DataCollatorWithFlattening()}),
    "`PackedDataCollator('padded')`": ({}, {"collator": PackedDataCollator("padded")}),
    "`PackedDataCollator('4d_mask')`": ({}, {"collator": PackedDataCollator("4d_mask", window=None)}),
    "the same, Mistral (sliding window)": (
        {},
        {"collator": PackedDataCollator("4d_mask", window=None), "kind": "mistral"},
    ),
    "attention: eager": ({}, {"attention": "eager"}),
    "attention: sdpa": ({}, {"attention": "sdpa"}),
    "attention: multipack": ({}, {"attention": "multipack"}),
    "Mamba (recurrent state)": ({}, {"kind": "mamba"}),
    "`LlamaForSequenceClassification`": ({}, {"task": "SequenceClassification"}),
    "`LlamaForTokenClassification`": ({}, {"task": "TokenClassification"}),
}
"""Row → arguments of TrainingArguments (SFTConfig), and of `train`."""


HOSTS = ("transformers", "trl")


def ask_trainers(name: str, hosts: tuple[str, ...] = HOSTS) -> list[str]:
    """The answers of a row."""
    settings, given = SETTINGS[name]
    only_trl = {"packing", "padding_free", "loss_type"} & set(settings) or name == PAIRS
    is_run = name == ON_RANKS or not ({"machine", "divided"} & set(given) or "torch_compile" in settings)
    return [
        ABSENT
        if only_trl and host != "trl"
        else unless_run(answer(train, "dpo" if name == PAIRS else host, settings, **given), is_run)
        for host in hosts
    ]


def trainers() -> Table:
    """Every setting under both trainers."""
    text = (
        "Rows: arguments of `TrainingArguments` (`SFTConfig`), the data, the model. ✓: a tiny model trains a step"
        " with it on a CPU (with 2 processes, `tests/distributed/test_trainers.py` compares the weights with those of"
        " documents alone). ○: the trainer accepts it and reads a first batch; no test trains with it. –: the host has"
        " no such argument."
    )
    made = Table("transformers and TRL", text, ["setting", "`PackedTrainer`", "`PackedSFTTrainer`"])
    made.rows = {name: ask_trainers(name) for name in SETTINGS}
    return made

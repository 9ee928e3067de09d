"""The examples of loops without a Trainer, on one and two processes: equal to documents alone, and resumed exactly."""

import importlib.util
import io
import multiprocessing
import pickle
from pathlib import Path

import pytest
import torch
from hosts import CASES, RATE, ROW, Texts, check_ranks, collator, numbers_of, tiny_llama, weights

EXAMPLES = Path(__file__).parents[2] / "examples"


def recorded(model, rows):
    """The same model, which records the documents of every row that it reads."""
    model.register_forward_pre_hook(
        lambda _model, _inputs, named: rows.append(numbers_of(named)), with_kwargs=True
    )
    return model


def loaded(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.PackedDataCollator = collator
    return example


def case_loop(world, name, accumulation, lora, settings):
    """Rows and weights of a run, and of one that stops in the middle of epoch 1 and is resumed."""
    # A pool's process may start workers of a loader, as one started by hand does: those of a server import torch anew.
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    example = loaded(name)
    settings = settings | {"capacity": 2 * ROW, "accumulation": accumulation, "rate": RATE}
    rows, again = [], []
    model = tiny_llama(lora)
    example.train(recorded(model, rows), Texts(), **settings)
    middle = len(rows) // accumulation * 3 // 4
    saved = example.train(recorded(tiny_llama(lora), again), Texts(), **settings, stop=middle)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    resumed = tiny_llama(lora)
    example.train(recorded(resumed, again), Texts(), **settings, saved=torch.load(file, weights_only=False))
    return {"rows": [rows, again], "weights": [weights(model), weights(resumed)], "middle": saved["epoch"]}


def check(found, accumulation, lora):
    check_ranks(found, accumulation, lora)
    assert {rank["middle"] for rank in found} == {1}


LOOPS = [
    ("pytorch_loop", "torchdata", {}),
    ("accelerate_loop", "accelerate", {"cpu": True}),
]


@pytest.mark.parametrize(("processes", "accumulation", "lora"), CASES)
@pytest.mark.parametrize(("name", "package", "settings"), LOOPS)
def test_a_loop_equals_every_document_alone(pools, name, package, settings, accumulation, lora, processes):
    for needed in ("transformers", "torchdata", package, *(["peft"] if lora else [])):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    found = pools(processes).run(case_loop, name, accumulation, lora, settings)
    check(found, accumulation, lora)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 1])
def test_a_loop_reads_with_worker_processes(pools, processes):
    for needed in ("transformers", "torchdata"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    check(pools(processes).run(case_loop, "pytorch_loop", 2, False, {"workers": 2}), 2, False)


def unpickled(tensor, size, _group):
    """An object that a rank sent."""
    return pickle.loads(tensor.numpy().tobytes()[:size])


def case_lightning(world, accumulation, lora, folder):
    """The same with Lightning: rows and weights of a run, and of one that is resumed."""
    import lightning
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.strategies import DDPStrategy
    from torch.distributed import distributed_c10d

    example = loaded("lightning_module")

    class Stop(Checkpoint):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == self.step and not trainer.should_stop:
                trainer.save_checkpoint(f"{folder}/middle.ckpt")
                self.epoch, trainer.should_stop = trainer.current_epoch, True

    def fit(step=None, path=None):
        rows, model = [], tiny_llama(lora)
        stop = Stop()
        stop.step = stop.epoch = step
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world.size,
            strategy=DDPStrategy(process_group_backend="gloo") if world.size > 1 else "auto",
            max_epochs=2,
            accumulate_grad_batches=accumulation,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=bool(step),
            callbacks=[stop] if step else [],
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        module = example.Packed(recorded(model, rows), Texts(), capacity=2 * ROW, rate=RATE)
        trainer.fit(module, ckpt_path=path, weights_only=False)
        return rows, weights(model), stop.epoch

    with pytest.MonkeyPatch.context() as patch:  # Lightning's own ranks send each other objects
        patch.setattr(distributed_c10d, "_tensor_to_object", unpickled)
        rows, whole, _ = fit()
        before, _, epoch = fit(step=len(rows) // accumulation * 3 // 4)
        after, resumed, _ = fit(path=f"{folder}/middle.ckpt")
    return {"rows": [rows, before + after], "weights": [whole, resumed], "middle": epoch}


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "accumulation", "lora"), CASES)
def test_lightning_equals_every_document_alone(pools, tmp_path, accumulation, lora, processes):
    for needed in ("transformers", "torchdata", "lightning", *(["peft"] if lora else [])):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    check(pools(processes).run(case_lightning, accumulation, lora, str(tmp_path)), accumulation, lora)

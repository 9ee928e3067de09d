"""Train by Axolotl's own functions, and write which documents each micro-batch of this rank held.

    python axolotl_run.py CONFIG.yml OUTPUT [SETTINGS]     or under torchrun; writes OUTPUT.RANK

SETTINGS are JSON, for settings that Axolotl takes on a GPU only: they are changed after it has checked them.
Documents begin with token 256 and their number in two digits of base 100.
"""

import json
import os
import sys

import torch


def load_on_cpu(*args, load=torch.load, map_location=None, **kwargs):
    """With two processes and no GPU, transformers loads optimizers to cpu:0, which torch.load does not know."""
    return load(*args, map_location="cpu", **kwargs)


def documents_of(inputs):
    """Numbers of the documents of a micro-batch."""
    found = []
    for ids, positions in zip(inputs["input_ids"].tolist(), inputs["position_ids"].tolist(), strict=True):
        starts = [place for place, position in enumerate(positions) if position == 0 and ids[place] == 256]
        found += [100 * ids[start + 1] + ids[start + 2] for start in starts]
    return found


def trained(trainer):
    """All trained weights."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: value.tolist() for name, value in model.named_parameters() if value.requires_grad}


def main(config, output, settings="{}"):
    """Train, and write the steps that were promised and run, the documents of each epoch, and the weights."""
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import setup_model_and_trainer

    torch.load = load_on_cpu
    cfg = load_cfg(config)
    cfg.device_map = None  # transformers places models on accelerators only
    for name, value in json.loads(settings).items():
        cfg[name] = value
    data = load_datasets(cfg=cfg, cli_args=TrainerCliArgs())
    trainer = setup_model_and_trainer(cfg, data)[0]
    seen, step, first = [], trainer.training_step, trained(trainer)

    def training_step(model, inputs, *args, **kwargs):
        seen.append((int(trainer.state.epoch or 0), trainer.state.global_step, documents_of(inputs)))
        return step(model, inputs, *args, **kwargs)

    trainer.training_step = training_step
    trainer.train(resume_from_checkpoint=cfg.resume_from_checkpoint)
    result = {"promised": data.total_num_steps, "run": trainer.state.global_step, "seen": seen}
    result |= {"first": first, "weights": trained(trainer), "collator": type(trainer.data_collator).__name__}
    with open(f"{output}.{os.environ.get('RANK', '0')}", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What the sources of this project document stays: their names, parameters, defaults and figures.

The sources are the README of multipack_sampler V2 (000), Axolotl's reference page of its packing (001), and the talk
"Parallel Training Methods" with wordplay's run (004). The tables below are compared with the code, and with
the text of the sources where `../shared/seeds` is at hand.
"""

import ast
import inspect
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from multipack.integrations import axolotl, multipack_v2
from multipack.models.decoder import Decoder
from multipack.planning.report import PlanReport
from multipack.shapes import SHAPES
from multipack.training.metrics import LEGEND
from multipack.training.optimizer import parameter_options
from multipack.training.other_names import translate
from multipack.training.run_config import Config, compose
from multipack.training.settings import OptimizerConfig
from multipack.words import ConfigError, describe

SEEDS = Path(__file__).resolve().parents[1].parent / "shared" / "seeds"

AXOLOTL = {
    "MultipackBatchSampler": "sampler, batch_size, batch_max_len, lengths, packing_efficiency_estimate=1.0,"
    " drop_last=True, num_count_samples=4, sequential=False, group_size=100000, bin_size=200, num_processes=None,"
    " safe_mode=True, mp_start_method='fork', **kwargs",
    "MultipackBatchSampler.efficiency": "",
    "MultipackBatchSampler.gather_efficiency": "",
    "MultipackBatchSampler.gather_len_batches": "num",
    "MultipackBatchSampler.generate_batches": "set_stats=False",
    "MultipackBatchSampler.set_epoch": "epoch",
    "allocate_sequentially": "sequence_lengths, rank, bin_capacity, num_ranks",
    "ffd_check": "sequence_lengths, bin_capacity, num_bins",
    "pack_group": "sequence_lengths, group_offset, bin_capacity, max_bins, bin_size, safe_mode=True",
    "pack_parallel": "sequence_lengths, bin_capacity, group_size, bin_size, num_processes=None, safe_mode=True,"
    " mp_start_method='fork'",
}
"""Class, method or function → its parameters."""

MOVED = {"MultipackBatchSampler": ["bin_size"]}
"""Parameters that later versions of Axolotl have elsewhere: the fifth since December 2025."""

V2 = ("MultipackDistributedBatchSampler", "MultipackDistributedBatchSampler_LinearAttention")
V2_ARGUMENTS = ("batch_max_length", "lengths", "seed=0")
V2_FIGURES = {
    "L^2 lag": ["l2_lag_mean", "l2_lag_max"],
    "Efficiency": ["efficiency"],
    "Utilization": ["utilization"],
}
"""Figure of the benchmark → fields of a plan's report."""

METRICS = {
    **{
        name: name
        for name in ("step", "loss", "dt", "dtf", "dtb", "sps", "tps", "mfu", "train_loss", "val_loss")
    },
    "sps_per_gpu": "sps_per_device",
    "tps_per_gpu": "tps_per_device",
}
"""Metric of wordplay → metric here."""

SETTINGS = {
    "train.framework": None,
    "train.backend": "parallel.data",
    "train.device": "train.device",
    "train.seed": "train.seed",
    "train.port": None,
    "train.ds_config_path": None,
    "train.precision": None,
    "train.ngpus": None,
    "train.use_wandb": None,
    "train.eval_interval": "train.eval_every",
    "train.log_interval": "log.every",
    "train.eval_iters": "train.eval_packs",
    "train.eval_only": None,
    "train.always_save_checkpoint": None,
    "train.init_from": "train.resume",
    "train.wandb_project": "track.project",
    "train.max_iters": "train.steps",
    "train.warmup_iters": "optimizer.warmup_steps",
    "train.dtype": "train.dtype",
    "train.compile": "train.compile",
    "model.n_layer": "model.layers",
    "model.n_head": "model.heads",
    "model.n_embd": None,
    "model.batch_size": None,
    "model.block_size": "data.block_size",
    "model.activation": "model.activation",
    "model.dropout": "model.dropout",
    "model.bias": "model.bias",
    "model.vocab_size": "model.vocabulary_size",
    "data.dataset": None,
    "data.out_dir": "out",
    "data.root_path": None,
    "optimizer.gas": "plan.micro_batches",
    "optimizer.name": "optimizer.name",
    "optimizer.learning_rate": "optimizer.lr",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "optimizer.beta1": "optimizer.beta1",
    "optimizer.beta2": "optimizer.beta2",
    "optimizer.grad_clip": "optimizer.clip",
    "optimizer.decay_lr": None,
    "optimizer.lr_decay_iters": "optimizer.decay_steps",
    "optimizer.min_lr": "optimizer.min_lr",
}
"""Setting of wordplay → setting here; None = an error that says what to set instead."""

COMMAND = (
    "train.backend=DDP train.eval_interval=100 data=shakespeare train.dtype=bf16 model.batch_size=64"
    " model.block_size=1024 train.max_iters=1000 train.log_interval=10 train.compile=false"
)
PARAMETERS = {
    "num_params=": 85_003_776,
    "decayed parameter tensors: 50, with ": 85_771_008,
    "non-decayed parameter tensors: 25, with ": 19_200,
}
"""Words before a number of wordplay's log → the number."""
TEXT = {"length of dataset in characters: ": 1_115_394, "vocab size: ": 65}


def seed(number):
    """The text of a source, or a skip."""
    found = sorted(SEEDS.glob(f"{number}_*.txt"))
    if not found:
        pytest.skip("../shared/seeds is not here")
    return found[0].read_text(encoding="utf-8")


def arguments(text):
    """Parameters as text, without spaces of their own."""
    return ast.unparse(ast.parse(f"def f({text}): pass").body[0].args)


def test_axolotl_table_is_its_page():
    text = seed("001")
    signatures = re.findall(r"^utils\.samplers\.multipack\.([\w.]+)\(([^)]*)\)", text, re.MULTILINE)
    assert {name: arguments(given) for name, given in signatures} == {
        name: arguments(given) for name, given in AXOLOTL.items()
    }


@pytest.mark.parametrize("name", AXOLOTL)
def test_axolotl_names_parameters_and_defaults(name):
    documented = inspect.signature(eval(f"lambda {AXOLOTL[name]}: None")).parameters
    found = axolotl
    for part in name.split("."):
        found = getattr(found, part)
    ours = inspect.signature(found).parameters
    assert documented.keys() <= ours.keys()
    for key, parameter in documented.items():
        assert (parameter.kind, parameter.default) == (ours[key].kind, ours[key].default), key
    kept = [key for key in ours if key in documented and key not in MOVED.get(name, ())]
    assert kept == [key for key in documented if key not in MOVED.get(name, ())]
    assert set(ours) - set(documented) <= {"self", *(k for k, p in ours.items() if p.default is not p.empty)}


def test_axolotl_gathers_alone():
    sampler = axolotl.MultipackBatchSampler(range(40), 1, 100, [30] * 40)
    assert sampler.gather_len_batches(7.9) == 7
    assert sampler.efficiency() == pytest.approx(40 * 30 / (len(sampler) * 100))
    assert sampler.gather_efficiency() == int(0.997 * sampler.efficiency() * 200) / 200


def test_v2_table_is_its_readme():
    readme = json.loads(seed("000"))["readme"]
    assert set(re.findall(r"`(Multipack\w+)`", readme)) == set(V2)
    used = re.search(r"sampler = MultipackDistributedBatchSampler\((.*?)\)", readme, re.DOTALL)[1]
    assert tuple(re.findall(r"(\w+=0|\w+)=?\w*,?\n", used)) == V2_ARGUMENTS
    assert set(V2_FIGURES) == set(re.findall(r"^(L\^2 lag|\w+)(?= avg|: \d+\.\d+%)", readme, re.MULTILINE))
    assert re.findall(r"^Sampler (\w+)", readme, re.MULTILINE) == ["Multipack", "Multipack", "Interleaved"]


@pytest.mark.parametrize("name", V2)
def test_v2_names_arguments_and_figures(name):
    signature = inspect.signature(getattr(multipack_v2, name))
    made = dict(argument.partition("=")[::2] for argument in V2_ARGUMENTS)
    required = [key for key, value in signature.parameters.items() if value.default is value.empty]
    assert required == [key for key in made if not made[key]]
    assert signature.parameters["seed"].default == int(made["seed"])
    assert {figure for own in V2_FIGURES.values() for figure in own} <= {
        each.name for each in fields(PlanReport)
    }
    sampler = getattr(multipack_v2, name)(batch_max_length=16 * 2048, lengths=[2048] * 40, seed=0)
    assert sum(len(batch) for batch in sampler) == 40
    assert max(len(batch) for batch in sampler) <= 16
    assert multipack_v2.InterleavedSampler


def test_wordplay_tables_are_its_log():
    text = seed("004")
    legend = text.split("Training Legend")[1].split("└")[0]
    assert set(re.findall(r"│ (\w+) +│", legend)) == METRICS.keys()
    assert set(re.findall(r"(\w+)=", re.search(r"\] - (step=10 .*)", text)[1])) == METRICS.keys()
    given = json.loads(re.search(r"- (\{\n\"train\": .*?\n\}\n\})", text, re.DOTALL)[1])
    assert [f"{group}.{key}" for group, values in given.items() for key in values] == list(SETTINGS)
    run = text.split("launch python3 -m wordplay")[1].split("| tee")[0]
    assert run.replace("\\\n", "").split() == COMMAND.split()
    for before, number in (PARAMETERS | TEXT).items():
        assert f"{before}{number:,}" in text or f"{before}{number}" in text, before


def test_wordplay_metrics_are_logged():
    assert set(METRICS.values()) <= LEGEND.keys()


def test_wordplay_settings_are_taken_or_answered():
    known = {key for key, *_ in describe(Config)}
    for name, own in SETTINGS.items():
        if own is None:
            with pytest.raises(ConfigError, match=f"{re.escape(name)} has no equivalent here: "):
                translate(name, "1")
        else:
            value = "scratch" if name == "train.init_from" else "1"
            assert translate(name, value)[0] == own
            assert own in known
    words = [word for word in COMMAND.split() if not word.startswith("model.batch_size")]
    run = compose([*words, "data.path=input.txt", "optimizer.name=AdamW"])
    assert (run.train.steps, run.train.eval_every, run.log.every, run.data.block_size) == (
        1000,
        100,
        10,
        1024,
    )
    assert (run.parallel.data, run.train.dtype, run.tokenizer.kind) == ("ddp", "bf16", "char")


def test_wordplay_parameters():
    """12 layers, 768 wide, 1,024 characters of 65 kinds: queries, keys and values are matrices of their own here."""
    shape = replace(SHAPES["gpt2"], vocabulary_size=65, context=1024, bias=False)
    with torch.device("meta"):
        parameters = dict(Decoder(shape).named_parameters())
    options = parameter_options(parameters, OptimizerConfig(weight_decay=0.1))
    decayed = [parameters[name].numel() for name, each in options.items() if each.weight_decay]
    others = [parameters[name].numel() for name, each in options.items() if not each.weight_decay]
    everything, decaying, plain = PARAMETERS.values()
    assert (len(decayed) - 2 * 12, sum(decayed)) == (50, decaying)
    assert (len(others), sum(others)) == (25, plain)
    assert sum(decayed) + sum(others) - parameters["positions.weight"].numel() == everything


def test_shakespeare_has_the_characters_of_the_log(shared_data):
    from multipack.data.text.tokenizer import character_tokenizer

    text = (shared_data / "text" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    assert [len(text), character_tokenizer(iter([text])).vocabulary_size] == list(TEXT.values())

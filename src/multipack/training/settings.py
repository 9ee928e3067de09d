"""Settings of training: run, optimizer, log, trackers, preferences. Needs no torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Literal

from multipack.parallel.parallel_config import Device
from multipack.planning.options import LossWeighting
from multipack.training.rules import read_rule

TRACKER_NAMES = ("tensorboard", "wandb", "mlflow", "trackio")
"""What `track.to` accepts; see `multipack.training.trackers`."""


@dataclass
class TrainConfig:
    """The life of a run."""

    steps: int = 0
    """Global steps; 0 = train.epochs passes over the documents."""
    epochs: float = 1.0
    """Passes over the documents, where train.steps is 0."""
    eval_every: int = 50
    """Steps between evaluations with a sample; there is one before the first step and one at the end too. 0 = never."""
    eval_packs: int = 0
    """Most validation packs of an evaluation, rounded up to whole global steps; 0 = all."""
    eval_only: bool = False
    """Evaluate, write a sample and stop."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 = at evaluations. There is one at the end in any case."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept; 0 = all."""
    checkpoint_async: bool = False
    """Write checkpoints in the background while training goes on; each is first copied to the CPU's memory."""
    resume: str = "false"
    """`true` continues the run in out=; `auto` does so too, or begins it; a run directory or checkpoint: that one."""
    loss_weighting: LossWeighting = "token"
    """What the loss is a mean over: every target `token` alike, or every `document` alike (a cut piece is one)."""
    seed: int = 0
    """Of the initial weights, the order of documents, dropout and samples."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of forward passes; auto = bf16 autocast where the device computes it natively. fp16 scales the loss."""
    device: Device = "auto"
    """Where to train; auto = a GPU if there is one."""
    sample_prompt: str = ""
    """What samples begin with; empty = a prompt from the validation documents."""
    sample_tokens: int = 64
    """Tokens of a sample; 0 = no samples."""
    sample_temperature: float = 0.8
    """Temperature of samples; 0 = greedy."""
    sample_top_k: int = 50
    """Samples draw from this many likeliest tokens; 0 = all."""
    compare_padding: bool = True
    """At the end, measure what padding would have cost (one process only)."""
    padded_batch_size: int = 8
    """Documents in a batch of the padded training that the run is compared with."""
    fixed_shape: bool = False
    """Fill every pack up to plan.capacity with a padding document, so that all batches have one shape."""
    prefetch: int = 2
    """Packs collated ahead in a background thread; 0 = none."""
    compile: bool = False
    """Compile every block with torch.compile: the first steps take longer, the others less time."""
    recompute: Literal["none", "full", "selective"] = "none"
    """What the backward pass computes again instead of keeping: whole blocks (full), or what is cheap (selective)."""
    tiles: int = 1
    """Pieces in which feed-forwards and the vocabulary are computed one after the other: less memory, more work."""
    deterministic: bool = False
    """Only kernels whose results never differ between runs: two runs are equal to the last bit, maybe slower."""
    init_from: str = ""
    """Weights (and tokenizer) to begin with: a run, a checkpoint, or a folder in Hugging Face's format."""
    z_loss: float = 0.0
    """Weight of (log Σ exp logits)² in the loss of training, which keeps logits small; 1e-4 is usual."""
    label_smoothing: float = 0.0
    """Share of each target's probability that is spread over the vocabulary, in training."""
    ema_decay: float = 0.0
    """Decay of a running mean of the weights, kept beside them and evaluated too; 0 = none, 0.999 is usual."""
    spike: Literal["off", "skip", "stop"] = "off"
    """What becomes of a step whose loss or gradient jumps: applied, left out (and logged), or the run stops."""
    spike_factor: float = 6.0
    """A jump is this many standard deviations above the recent mean."""
    patience: int = 0
    """Evaluations without a better validation loss after which the run stops early; 0 = never."""
    min_improvement: float = 0.0
    """How much lower a validation loss must be to count as better."""
    profile: bool = False
    """Write one torch trace of a few steps (after the first ones) to the run directory."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        counts = ("steps", "eval_every", "eval_packs", "checkpoint_every", "keep_checkpoints", "prefetch")
        for name in (*counts, "seed", "sample_tokens", "sample_temperature", "sample_top_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name} must not be negative, got {getattr(self, name)}")
        if self.steps == 0 and self.epochs <= 0:
            raise ValueError("set train.steps, or train.epochs above 0")
        # YAML's booleans and an empty word mean what they look like.
        self.resume = {"True": "true", "False": "false", "": "false"}.get(self.resume, self.resume)
        for name in ("ema_decay", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"train.{name} must be in [0, 1), got {getattr(self, name)}")
        if self.z_loss < 0 or self.min_improvement < 0 or self.patience < 0:
            raise ValueError("train.z_loss, train.patience and train.min_improvement must not be negative")
        if self.patience and not self.eval_every:
            raise ValueError(
                f"train.patience={self.patience} counts evaluations: set train.eval_every above 0"
            )
        if self.spike_factor <= 0:
            raise ValueError(f"train.spike_factor must be positive, got {self.spike_factor}")
        if self.padded_batch_size < 1:
            raise ValueError(f"train.padded_batch_size must be at least 1, got {self.padded_batch_size}")
        if self.tiles < 1:
            raise ValueError(f"train.tiles must be at least 1, got {self.tiles}")


@dataclass
class LogConfig:
    """What is printed."""

    every: int = 10
    """Steps between log lines; 0 = none. metrics.jsonl has every step."""
    all_ranks: bool = False
    """Every rank prints, each line with its time and rank."""
    layer_norms: bool = False
    """Log the gradient's and the weights' norms of every layer."""
    gradient_noise: bool = False
    """Log the gradient's noise scale, in targets: about the batch beyond which more data a step helps little."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.every < 0:
            raise ValueError(f"log.every must not be negative, got {self.every}")


@dataclass
class OptimizerConfig:
    """AdamW, its schedule and gradient clipping."""

    lr: float = 2e-3
    """Peak learning rate."""
    min_lr: float = -1.0
    """Learning rate at the end of the schedule; negative = a tenth of optimizer.lr."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """How learning rates grow with the targets of a step: not at all, by their root, or by their number."""
    reference_tokens: int = 0
    """Targets of a step that optimizer.lr was found with; needed by optimizer.lr_scaling."""
    warmup_steps: int = 20
    """Steps in which the learning rate rises linearly to its peak."""
    decay_steps: int = 0
    """Step at which the schedule reaches min_lr; 0 = the last step of the run."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """What follows the warm-up: half a cosine or a line down to min_lr, the peak for ever, or until a decay."""
    decay_share: float = 0.2
    """Share of the steps, the last ones, over which schedule=wsd decays."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """How schedule=wsd decays: along a line, or along 1 - sqrt(progress), which falls fast at first."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of tensors with two or more dimensions."""
    rules: list[str] = field(default_factory=list)
    """Exceptions by (globs of) parameters' or modules' names: `*.bias lr=2 weight_decay=0`, `blocks.0 freeze`."""
    fused: Literal["auto", "true", "false"] = "auto"
    """One kernel for all tensors of a group: auto = where the device has it; false = several kernels (foreach)."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 = no clipping."""

    def __post_init__(self) -> None:
        """Refuse what would not train."""
        if self.lr <= 0:
            raise ValueError(f"optimizer.lr={self.lr} must be positive")
        if self.min_lr > self.lr:
            raise ValueError(f"optimizer.min_lr={self.min_lr} must not exceed optimizer.lr={self.lr}")
        if self.clip < 0 or self.weight_decay < 0 or self.warmup_steps < 0 or self.decay_steps < 0:
            raise ValueError(
                "optimizer.clip, weight_decay, warmup_steps and decay_steps must not be negative"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}")
        if not 0 < self.decay_share <= 1:
            raise ValueError(f"optimizer.decay_share must be in (0, 1], got {self.decay_share}")
        if self.lr_scaling != "none" and self.reference_tokens < 1:
            raise ValueError(
                f"optimizer.lr_scaling={self.lr_scaling} needs optimizer.reference_tokens, the targets of a step"
                f" that optimizer.lr was found with, got {self.reference_tokens}"
            )
        for text in self.rules:
            read_rule(text)


@dataclass
class TrackConfig:
    """Which trackers get a run's records, beside metrics.jsonl."""

    to: list[str] = field(default_factory=list)
    """Any of tensorboard, wandb, mlflow and trackio; each needs the extra of its name."""
    project: str = "multipack"
    """Project of wandb and trackio, experiment of mlflow."""
    entity: str = ""
    """User or team of wandb; empty = wandb's default."""
    name: str = ""
    """Name of the run; empty = the run directory's."""
    run_id: str = ""
    """Go on in this run of wandb or mlflow; empty = a new one, or that of the run which is resumed."""
    group: str = ""
    """Group of runs in wandb and trackio, a tag in mlflow."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """online = as each tracker is set up; offline = files on this machine alone; disabled = track.to is left out."""
    folder: str = ""
    """Where trackers keep their files; empty = the run directory. Trackio's own setting says where its files are."""

    def __post_init__(self) -> None:
        """Refuse what is no tracker."""
        for name in self.to:
            if name not in TRACKER_NAMES:
                near = difflib.get_close_matches(name, TRACKER_NAMES, 1)
                also = "metrics.jsonl is always written" if name == "jsonl" else ""
                hint = also or (f"did you mean {near[0]}?" if near else "")
                raise ValueError(
                    f"track.to={name} is none of {', '.join(TRACKER_NAMES)}" + (f"; {hint}" if hint else "")
                )
            if self.to.count(name) > 1:
                raise ValueError(f"track.to names {name} more than once")
        if self.run_id and {"wandb", "mlflow"} <= set(self.to):
            raise ValueError(
                f"track.run_id={self.run_id} cannot name a run of wandb and one of mlflow: leave one out of track.to"
            )
        if not self.project:
            raise ValueError("track.project must not be empty: it is where trackers keep runs together")


@dataclass
class PreferenceConfig:
    """Direct preference optimization (DPO)."""

    beta: float = 0.1
    """How strongly the model is held to the reference: larger values let it move less."""
    label_smoothing: float = 0.0
    """Share of the preferences that is taken as wrong, below 0.5; 0 = plain DPO."""
    reference: str = ""
    """The reference model: a run, a checkpoint or a Hugging Face folder; empty = the run's own initial weights."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.beta <= 0:
            raise ValueError(f"preference.beta must be positive, got {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"preference.label_smoothing must be in [0, 0.5), got {self.label_smoothing}")

"""Settings of training: run, optimizer, log, trackers, preferences. Needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

from multipack.parallel.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerName
from multipack.parallel.parallel_config import Device
from multipack.planning.options import LossWeighting, check_choice
from multipack.ranges import Amount, Count, Finite, Positive, Range, Share, check_ranges

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""Values of `track.to`; see `training/callbacks/trackers.py`."""


DtypeName = Literal["auto", "fp32", "bf16", "fp16"]
"""Values of `train.dtype`."""
Choice = Literal["auto", "true", "false"]
"""Values of a setting that the run resolves if it is `auto`; see `resolve` in assemble.py."""
NEW_MODEL_LR = 2e-3
"""Default peak learning rate of models that start from random weights."""
ADAPTER_LR_SCALE = 10
"""Default peak learning rate of adapters over the default of whole models; most adapters are trained so."""


@dataclass(frozen=True)
class Rule:
    """An exception for some parameters, a text of `optimizer.rules`.

    Attributes:
        text: the rule as the user wrote it.
        pattern: a glob on names of parameters, or of modules with all their parameters.
        lr_scale: factor of the learning rate.
        weight_decay: decoupled weight decay; None = as without a rule.
        freeze: whether the parameters are not trained.
    """

    text: str
    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None
    freeze: bool = False

    def matches(self, name: str) -> bool:
        """Whether the pattern matches this parameter or a module that holds it."""
        return fnmatchcase(name, self.pattern) or fnmatchcase(name, f"{self.pattern}.*")


def read_rule(text: str) -> Rule:
    """Parse a rule.

    Raises:
        ValueError: a missing pattern or setting, or an unknown or illegal setting.
    """
    pattern, *words = text.split() or [""]
    settings: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if word == "freeze":
            settings["freeze"] = True
        elif key in ("lr", "weight_decay") and re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", value):
            settings["lr_scale" if key == "lr" else key] = float(value)
        else:
            raise ValueError(
                f"optimizer.rules: {word!r} of {text!r} is none of lr=FACTOR, weight_decay=VALUE (numbers that are not"
                " negative) and freeze"
            )
    if not settings or "=" in pattern:
        raise ValueError(
            f"optimizer.rules: {text!r} must have a pattern and at least one setting:"
            " PATTERN [lr=FACTOR] [weight_decay=VALUE] [freeze]"
        )
    if "freeze" in settings and len(settings) > 1:
        raise ValueError(f"optimizer.rules: {text!r} freezes its parameters: leave out its other settings")
    return Rule(text, pattern, **settings)


@dataclass
class TrainConfig:
    """Length, evaluation, checkpoints, precision and guards of a run."""

    steps: Count = 0
    """Global steps; 0 = train.epochs passes over the documents."""
    epochs: float = 1.0
    """Passes over the documents, where train.steps is 0."""
    eval_every: Count = 50
    """Steps between evaluations, each with a sample; also before the first step and at the end. 0 = never."""
    eval_packs: Count = 0
    """Most validation packs of an evaluation, rounded up to whole global steps; 0 = all."""
    checkpoint_every: Count = 1000
    """Steps between checkpoints; 0 = only at the end, where a run is always saved."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints to keep, beside the best one; 0 = all."""
    keep_best: bool = False
    """Save at every evaluation with the lowest validation loss so far; always true with train.patience."""
    checkpoint_async: bool = False
    """Write checkpoints in the background, from a copy in host memory."""
    resume: str = "false"
    """`true` continues the run in out=; `auto` continues or starts it; or the path of a run or checkpoint."""
    loss_weighting: LossWeighting = "token"
    """Unit of the mean loss: `token` weighs targets equally, `document` documents (pieces of split ones too)."""
    seed: Count = 0
    """Seed of initial weights, document order, dropout and samples."""
    dtype: DtypeName = "auto"
    """Precision of forward passes; auto = bf16 on GPUs that compute it natively, else fp32."""
    device: Device = "auto"
    """Where to train; auto = a GPU if there is one."""
    sample_prompt: str = ""
    """Prompt of samples; empty = the beginning of a validation document."""
    sample_tokens: Count = 64
    """Tokens of a sample; 0 = no samples. Runs whose ranks divide the model write none: see `multipack generate`."""
    fixed_shape: Choice = "auto"
    """Pad every pack to plan.capacity, so that all have one shape; auto = on GPUs and, in half precision, CPUs."""
    prefetch: Count = 2
    """Packs collated ahead in a background thread; 0 = none."""
    compile: Choice = "auto"
    """Compile every block with torch.compile: slower first steps, faster others; auto = on GPUs, where it can."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Activation checkpointing: recompute whole blocks (full) or cheap operations (selective) in the backward pass."""
    tiles: Positive = 1
    """Pieces in which feed-forwards and the vocabulary are computed one after the other: less memory, more work."""
    deterministic: bool = False
    """Use deterministic kernels only: runs are equal bit for bit, and may be slower."""
    init_from: str = ""
    """Initial weights (and tokenizer): a run, a checkpoint, or a folder in Hugging Face's format."""
    z_loss: Amount = 0.0
    """Weight of (log Σ exp logits)² in the training loss, which keeps logits small; typical: 1e-4."""
    label_smoothing: Share = 0.0
    """Share of each target's probability that is spread over the vocabulary in training."""
    spike: Literal["off", "skip", "stop"] = "off"
    """What to do with a step whose loss or gradient norm jumps: apply it, skip it, or stop the run."""
    patience: Count = 0
    """Stop after this many evaluations without a better validation loss; 0 = never."""
    profile: bool = False
    """Write a torch trace of three steps, after the first two, to the run directory."""

    RETIRED: ClassVar[dict[str, Any]] = {
        "compare_padding": ...,
        "ema_decay": 0.0,
        "min_improvement": 0.0,
        "padded_batch_size": ...,
        "sample_temperature": ...,
        "sample_top_k": ...,
        "spike_factor": 6.0,
    }

    def __post_init__(self) -> None:
        """Check ranges."""
        self.resume = self.resume or "false"
        check_ranges(self, "train.")
        if self.steps == 0 and self.epochs <= 0:
            raise ValueError("set train.steps, or train.epochs above 0")
        self.keep_best = self.keep_best or self.patience > 0
        if self.patience and not self.eval_every:
            raise ValueError(
                f"train.patience={self.patience} counts evaluations: set train.eval_every above 0"
            )


@dataclass
class LogConfig:
    """What a run prints and measures."""

    every: Count = 10
    """Steps between log lines; 0 = none. metrics.jsonl has every step."""
    verbose: bool = False
    """Print everything that the run resolved, the planner's report, the legend, and all metrics of a step."""
    gradient_noise: bool = False
    """Log the gradient noise scale, in targets: larger steps than this help little."""
    documents: bool = True
    """Write the numbers of every step's documents, about 8 bytes each, for `multipack audit`."""

    RETIRED: ClassVar[dict[str, Any]] = {"all_ranks": ..., "layer_norms": ...}

    def __post_init__(self) -> None:
        """Check ranges."""
        check_ranges(self, "log.")


@dataclass
class OptimizerConfig:
    """Optimizer, schedule and gradient clipping."""

    RETIRED: ClassVar[dict[str, Any]] = {"decay_shape": "linear", "lr_scaling": "none", "reference_tokens": 0}

    name: OptimizerName = DEFAULT_OPTIMIZER
    """AdamW, its moments in 32, 16 or 8 bits, or Muon for matrices of blocks."""
    lr: Finite = -1.0
    """Peak learning rate; negative = 2e-3 for new models, 2e-5 with train.init_from, 1e-6 for pairs; adapters: 10 x."""
    min_lr: Finite = -1.0
    """Learning rate at the end of the schedule; negative = a tenth of optimizer.lr."""
    warmup_steps: Amount = 0.03
    """Steps in which the learning rate rises linearly to its peak; below 1: a share of the schedule."""
    decay_steps: Count = 0
    """Step at which the schedule reaches min_lr; 0 = the last step of the run."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warm-up: cosine or linear decay to min_lr, constant, or constant with a final decay (wsd)."""
    decay_share: Annotated[float, Range(above=0, most=1)] = 0.2
    """Last share of the steps, over which schedule=wsd decays."""
    beta1: Share = 0.9
    """Decay of the first moment."""
    beta2: Share = 0.95
    """Decay of the second moment."""
    momentum: Share = 0.95
    """Decay of Muon's momentum."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Amount = 0.1
    """Decoupled weight decay of tensors with two or more dimensions."""
    rules: list[str] = field(default_factory=list)
    """Exceptions by globs on names of parameters or modules: `*.bias lr=2 weight_decay=0`, `blocks.0 freeze`."""
    fused: Literal["auto", "true", "false"] = "auto"
    """Fused AdamW kernel: auto = where the device has one; false = several kernels (foreach)."""
    clip: Amount = 1.0
    """Maximum global norm of the gradient; 0 = no clipping."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_ranges(self, "optimizer.")
        peak = NEW_MODEL_LR if self.lr < 0 else self.lr
        if self.min_lr > peak:
            raise ValueError(f"optimizer.min_lr={self.min_lr} must not exceed optimizer.lr={peak}")
        if self.warmup_steps >= 1 and self.warmup_steps % 1:
            raise ValueError(
                f"optimizer.warmup_steps={self.warmup_steps} must be whole steps, or a share below 1"
            )
        if 0 < self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"optimizer.decay_steps={self.decay_steps}, where the schedule ends, must exceed"
                f" optimizer.warmup_steps={self.warmup_steps}"
            )
        if self.fused == "true" and not OPTIMIZERS[self.name].has_fused:
            raise ValueError(
                f"optimizer.fused=true: {self.name} has no fused kernel; use optimizer.fused=auto"
            )
        for text in self.rules:
            read_rule(text)

    @property
    def adam_options(self) -> dict[str, Any]:
        """`lr`, `betas` and `eps`, the arguments of AdamW."""
        return {"lr": self.lr, "betas": (self.beta1, self.beta2), "eps": self.eps}


@dataclass
class TrackConfig:
    """Trackers that get a run's records, beside metrics.jsonl."""

    to: list[str] = field(default_factory=list)
    """Any of tensorboard, wandb, mlflow and trackio; each needs the extra of its name."""
    project: str = "multipack"
    """Project of wandb and trackio, experiment of mlflow."""
    entity: str = ""
    """User or team of wandb; empty = wandb's default."""
    name: str = ""
    """Name of the run; empty = the run directory's."""
    run_id: str = ""
    """Continue this run of wandb or mlflow; empty = a new one, or the resumed run's."""
    group: str = ""
    """Group of runs in wandb and trackio, a tag in mlflow."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """online = as each tracker is set up; offline = files on this machine only; disabled = ignore track.to."""

    RETIRED: ClassVar[dict[str, Any]] = {"folder": ...}

    def __post_init__(self) -> None:
        """Check names of trackers."""
        for name in self.to:
            check_choice("track.to", name, TrackerName)
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
    """Preference optimization of pairs (chosen, rejected) and of labeled answers: DPO, KTO and other objectives."""

    loss: str = "auto"
    """A row of models/objectives: sigmoid (DPO), robust, hinge, ipo, simpo, orpo, reward or kto; auto: by the data."""
    beta: Annotated[float, Range(above=0)] = 0.1
    """Factor of rewards: with a reference, the strength of the penalty for moving away from it."""
    label_smoothing: Annotated[float, Range(0, below=0.5)] = 0.0
    """Assumed share of wrong preferences, below 0.5, of the losses sigmoid and robust; 0 = none."""
    margin: Amount = 0.5
    """Difference of rewards that simpo asks for."""
    sft: Amount = 0.0
    """Weight of the chosen answer's negative log-probability per token, which is added to the loss; orpo has it."""
    desirable: Amount = 1.0
    """Weight of desirable answers in kto."""
    undesirable: Amount = 1.0
    """Weight of undesirable answers in kto."""
    reference: str = ""
    """The reference model: a run, a checkpoint or a Hugging Face folder; empty = the run's own initial weights."""

    def __post_init__(self) -> None:
        """Check ranges, and that the loss reads what was changed; `auto` is resolved when the documents are known."""
        check_ranges(self, "preference.")
        if self.loss == "auto":
            return
        from multipack.models.objectives import check_options, find_loss  # imports torch

        check_options(find_loss(self.loss), self.changed(), self.reference)

    def options(self) -> dict[str, float]:
        """Values of the settings that objectives read."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.type != "str"}

    def changed(self) -> dict[str, float]:
        """Options that differ from their defaults."""
        defaults = {entry.name: entry.default for entry in fields(self)}
        return {name: value for name, value in self.options().items() if value != defaults[name]}

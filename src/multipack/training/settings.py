"""`TrainConfig` and `LogConfig`: the life of a run, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multipack.models.recompute import Recompute
from multipack.parallel.parallel_config import Device
from multipack.planning.options import LossWeighting


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
    """Tokens of a sample."""
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
    recompute: Recompute = "none"
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
        for name in (*counts, "sample_temperature", "sample_top_k"):
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
        if self.padded_batch_size < 1 or self.sample_tokens < 1:
            raise ValueError("train.padded_batch_size and train.sample_tokens must be at least 1")
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

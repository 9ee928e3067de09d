"""Which observers a run has: those that its settings ask for, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from multipack.parallel.world import World
from multipack.run import RunDirectory
from multipack.training.averaging import MovingAverage
from multipack.training.gradients import GradientNoise, LayerNorms, needs_two_micro_batches
from multipack.training.observer import Observer, Observers
from multipack.training.settings import LogConfig, TrackConfig, TrainConfig
from multipack.training.spikes import SpikeGuard
from multipack.training.stopping import EarlyStopping
from multipack.training.tracing import Trace
from multipack.training.trackers import TrackerObserver, about_run, open_trackers


def build_observers(
    train: TrainConfig,
    log: LogConfig,
    track: TrackConfig,
    run: RunDirectory,
    world: World,
    *,
    settings: Mapping[str, Any],
    micro_batches: int,
    tell: Callable[[str], None],
) -> Observers:
    """The observers of a run. Nothing is written before the run's first step or record.

    Args:
        train: guards, mean of the weights, profile.
        log: what is measured on request.
        track: trackers.
        run: the run directory, which need not exist so far.
        world: the ranks; all of them call this.
        settings: the run's configuration, nested by groups, for trackers to show.
        micro_batches: of a rank, in every step.
        tell: prints a line; it is called on every rank.

    Raises:
        ValueError: a tracker's package is missing, or the gradient's noise cannot be seen with one micro-batch.
    """
    if log.gradient_noise and micro_batches < 2:
        raise ValueError(needs_two_micro_batches(micro_batches))
    observers: list[Observer] = []
    if train.profile:
        observers.append(Trace(run.path / "trace.json" if world.is_main else None, world.device, tell=tell))
    if log.layer_norms:
        observers.append(LayerNorms())
    if log.gradient_noise:
        observers.append(GradientNoise())
    if train.spike != "off":
        observers.append(SpikeGuard(train.spike, train.spike_factor, tell))
    if train.ema_decay:
        observers.append(MovingAverage(train.ema_decay))
    if train.patience:
        observers.append(EarlyStopping(train.patience, train.min_improvement))
    if track.to and track.mode != "disabled":
        trackers = open_trackers(track, world)
        observers.append(TrackerObserver(trackers, about_run(track, run.path, settings), tell))
    return Observers(observers)

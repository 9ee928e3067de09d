"""`PackedSFTTrainer`: TRL's SFTTrainer on planned packs.

    - trainer = SFTTrainer(model, SFTConfig(max_length=2048, packing=True), train_dataset=dataset)
    + trainer = PackedSFTTrainer(model, SFTConfig(max_length=2048), train_dataset=dataset)

TRL tokenizes, truncates and builds the labels; packs are planned from the result, as for `PackedTrainer`.
"""

from __future__ import annotations

from typing import Any

from multipack.integrations.collator import PackedDataCollator
from multipack.integrations.transformers import PackedTrainerMixin
from multipack.machine import import_extra

_trl: Any = import_extra("trl", "PackedSFTTrainer", "trl")


class PackedSFTTrainer(PackedTrainerMixin, _trl.SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer on planned packs.

    Args:
        model: see SFTTrainer, as for `args` and all other arguments; TRL's own packing is off.
        data_collator: a `PackedDataCollator`; None = one with its defaults.
        capacity: tokens of a pack; None = `max_length`.

    Raises:
        ValueError: TRL's own packing is on, or neither `capacity` nor `max_length` is set; or see `PackedTrainerMixin`.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: PackedDataCollator | None = None,
        *positional: Any,
        capacity: int | None = None,
        **named: Any,
    ) -> None:
        for name in ("packing", "eval_packing", "padding_free"):
            if getattr(args, name, False):
                raise ValueError(
                    f"{name}=True is TRL's own way to pack: PackedSFTTrainer packs without it; leave it out"
                )
        tokens = capacity
        if tokens is None:
            tokens = _trl.SFTConfig.max_length if args is None else getattr(args, "max_length", None)
        if tokens is None:
            raise ValueError("a pack needs a number of tokens: give capacity, or SFTConfig(max_length=…)")
        super().__init__(model, args, data_collator, *positional, capacity=tokens, **named)

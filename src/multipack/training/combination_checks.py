"""Checks of combinations of a run's settings: shared beginnings of documents, and optimizers that ranks divide."""

from __future__ import annotations

from typing import Any

from multipack.planning.items import check_item_options


def check_sharing(config: Any) -> None:
    """Check that everything in a configuration computes documents that share their beginnings.

    Raises:
        ValueError: it does not; the message names the setting.
    """
    given, model, parallel = (
        f"data.share_prefixes={config.data.share_prefixes}",
        config.model,
        config.parallel,
    )
    check_item_options(config.plan, given)
    if parallel.context > 1 and parallel.context_method == "planned":
        raise ValueError(
            f"parallel.context_method=planned divides documents, which {given} lets share tokens:"
            " use parallel.context_method=ulysses"
        )
    if (limit := model.rotation_limit) and config.plan.longest > limit.tokens:
        raise ValueError(
            f"model.{limit}, and shared tokens are of several: use plan.capacity={limit.tokens} with {given}"
        )


def check_optimizer(config: Any) -> None:
    """Check that the optimizer can update tensors as ranks divide them; raises a ValueError that names the setting."""
    name, parallel = config.optimizer.name, config.parallel
    if name == "muon" and parallel.offloads_parameters:
        raise ValueError(
            f"optimizer.name=muon multiplies whole matrices, which parallel.offload={parallel.offload} keeps on the"
            " host: use parallel.offload=none, or optimizer.name=adamw"
        )
    if name == "adamw_8bit" and parallel.tensor > 1:
        raise ValueError(
            f"optimizer.name=adamw_8bit has scales of 256 neighboring columns, which parallel.tensor="
            f"{parallel.tensor} divides: use optimizer.name=adamw_bf16, or parallel.tensor=1"
        )
    if name.endswith(("_bnb", "_ao")) and (parallel.uses_fsdp or parallel.offload != "none"):
        plain = {"tensor": 1, "pipeline": 1, "offload": "none"}
        setting = next((each for each, value in plain.items() if getattr(parallel, each) != value), "data")
        raise ValueError(
            f"optimizer.name={name} updates whole tensors on the device, which parallel.{setting}="
            f"{getattr(parallel, setting)} divides or moves: use parallel.{setting}={plain.get(setting, 'zero1')},"
            " or optimizer.name=adamw_8bit"
        )

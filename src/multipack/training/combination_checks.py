"""Checks of combinations of a run's settings with shared beginnings of documents."""

from __future__ import annotations

from typing import Any

from multipack.planning.options import check_item_options


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

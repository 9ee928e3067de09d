"""TRL's batchers of AsyncGRPO with this balancer inside, for TRL 1.16 and later.

    from multipack.integrations.trl_batchers import FixedCountBatcher, TokenBudgetBatcher

Each collects a micro-batch as TRL's class of the same name does, and then divides its groups of rollouts among the
rows, one row a rank, by `multipack.balance`: equal attention costs, a group in one row, none empty, none above the
budget. A rollout longer than the budget is an error instead of a lost one. AsyncGRPOTrainer looks the classes up in its
module: assign them there before it makes its dataloader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from trl.experimental.async_grpo import async_grpo_trainer as trainer

from multipack.planning.balance import balance
from multipack.planning.lengths import check_integer

if not hasattr(trainer, "TreeRow"):
    raise ImportError(
        "multipack.integrations.trl_batchers needs TRL 1.16 or later: pip install -U 'trl>=1.16'"
    )


def _evened(rows: list[Any], budget: int | None) -> list[Any]:
    """The samples in the same number of rows of equal load; `rows` themselves if no better ones were found."""
    groups: dict[Any, Any] = {}
    for number, row in enumerate(rows):
        for sample in row.samples:
            # TRL divides a group that does not fit into one row: its parts stay apart.
            key = (number, sample["group_id"])
            groups.setdefault(key, trainer.TreeRow()).add(sample)
    parts = list(groups.values())
    tokens = [max(len(part.tokens), part.trained) for part in parts]
    divided = balance(tokens, len(rows), budget=budget, cost=[part.load for part in parts])
    if divided.micro_batches > 1 or divided.loads.max() >= max(row.load for row in rows):
        return rows
    made = []
    for ((*members,),) in divided:
        made.append(trainer.TreeRow())
        for sample in (sample for member in members for sample in parts[member].samples):
            made[-1].add(sample)
    return made


class FixedCountBatcher(trainer.FixedCountBatcher):  # type: ignore[misc]
    """TRL's class of this name: a fixed number of rollouts a micro-batch, in rows of equal cost."""

    def __iter__(self) -> Iterator[list[Any]]:
        for rows in super().__iter__():
            yield _evened(rows, None)


class TokenBudgetBatcher(trainer.TokenBudgetBatcher):  # type: ignore[misc]
    """TRL's class of this name: rows of at most `token_budget` tokens and equal cost.

    Iteration raises ValueError for a rollout longer than the budget.
    """

    def __init__(self, dataset: Iterable[Any], num_processes: int, token_budget: int, metrics: Any) -> None:
        budget = check_integer("token_budget", token_budget)
        super().__init__(_Within(dataset, budget), num_processes, budget, metrics)

    def __iter__(self) -> Iterator[list[Any]]:
        for rows in super().__iter__():
            yield _evened(rows, self.token_budget)


class _Within:
    """A dataset of rollouts that raises for one longer than the budget, which TRL would drop with a warning."""

    def __init__(self, dataset: Iterable[Any], budget: int) -> None:
        self.dataset, self.budget = dataset, budget

    def __iter__(self) -> Iterator[Any]:
        for sample in self.dataset:
            if (tokens := len(sample["input_ids"])) > self.budget:
                raise ValueError(
                    f"a rollout of {tokens:,} tokens does not fit into token_budget={self.budget:,}; raise"
                    " AsyncGRPOConfig(token_budget=…) to the largest prompt + completion (vLLM's max_model_len)"
                )
            yield sample

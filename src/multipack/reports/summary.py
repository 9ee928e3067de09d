"""Rows of text about a plan and a token store, for the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from multipack.data.prepare import Corpus
from multipack.data.store import TokenStore
from multipack.planning.measure import PlanReport, padded_share

if TYPE_CHECKING:
    from multipack.training.session import Session

Rows = list[tuple[str, str]]


def report_rows(report: PlanReport, share: float, batch_size: int, ranks: int) -> Rows:
    """A plan in words.

    Args:
        report: of the plan, dealt to `ranks`.
        share: real-token share of padding random batches of `batch_size` documents.
        batch_size: see `share`.
        ranks: data-parallel ranks.
    """
    dealt = "" if ranks == 1 else f", {ranks} ranks"
    return [
        ("documents", f"{report.documents:,}"),
        ("tokens", f"{report.tokens:,}"),
        ("packs", f"{report.packs:,}"),
        ("global steps", f"{report.steps:,} (no plan could have fewer than {report.minimum_steps:,})"),
        ("packing efficiency", f"{report.efficiency:.2%} of the slots of all steps hold tokens"),
        ("utilization", f"{report.utilization:.2%} (tokens of the mean rank over the fullest{dealt})"),
        (
            "cost utilization",
            f"{report.cost_utilization:.2%} (cost of the mean rank over the dearest{dealt});"
            f" no arrangement of these steps could exceed {report.cost_utilization_ceiling:.2%}",
        ),
        ("L² lag", f"{report.l2_lag_mean:,.0f} mean, {report.l2_lag_max:,.0f} max"),
        ("dropped", f"{report.dropped_documents:,} documents, {report.dropped_tokens:,} tokens"),
        *(
            [("carried", f"{report.carried_documents:,} documents open the next epoch")]
            if report.carried_documents
            else []
        ),
        (
            "padding instead",
            f"{share:.1%} real tokens in random batches of {batch_size} padded to their longest",
        ),
        ("planned in", f"{report.seconds:.2f} s"),
    ]


def plan_rows(session: Session, report: PlanReport) -> Rows:
    """The plan of a run: the report, how steps are dealt, and what became of documents that were too long."""
    sampler, config = session.sampler, session.config
    batch_size = config.train.padded_batch_size
    share = padded_share(session.corpus.train.lengths, batch_size, config.train.seed)
    dealt = (
        f"{sampler.plan.packs_per_step} packs of at most {config.plan.capacity:,} tokens,"
        f" {sampler.micro_batches} a rank, one micro-batch each"
    )
    return [
        *report_rows(report, share, batch_size, session.world.size),
        ("a step", dealt),
        (
            "validation",
            f"{len(session.corpus.validation):,} documents, {session.corpus.validation.num_tokens:,} tokens",
        ),
        *corpus_notes(session.corpus),
    ]


def corpus_notes(corpus: Corpus) -> Rows:
    """What happened to documents on their way from the source: cut, dropped or skipped, never in silence."""
    fits = [("training", corpus.train_fit), ("validation", corpus.validation_fit)]
    rows = [(f"too long, {which}", fit.describe()) for which, fit in fits if fit.describe()]
    return rows + [("skipped", f"{count:,} {reason}") for reason, count in corpus.skipped.items()]


def store_rows(path: Path) -> Rows:
    """A token store in words."""
    store = TokenStore(path)
    lengths = store.lengths
    size = sum(file.stat().st_size for file in path.iterdir())
    return [
        ("folder", str(path)),
        ("documents", f"{store.num_documents:,}"),
        ("tokens", f"{store.num_tokens:,}"),
        ("vocabulary", f"{store.vocabulary_size:,}"),
        (
            "lengths",
            f"{lengths.min():,} shortest, {int(np.median(lengths)):,} median, {lengths.max():,} longest",
        ),
        ("size", f"{size / 2**20:.1f} MiB"),
        *[("skipped", f"{count:,} {reason}") for reason, count in store.header.skipped.items()],
    ]

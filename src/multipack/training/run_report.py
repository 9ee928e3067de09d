"""Rows about the plan and the documents of a run, for the console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multipack.planning.report import PlanReport, padded_share
from multipack.reports.summary import Rows, fills_packs, report_rows

if TYPE_CHECKING:
    from multipack.data.corpus import Corpus
    from multipack.training.session import Session


def plan_rows(session: Session, report: PlanReport) -> Rows:
    """Return the rows of a run's plan: its report, the packs of a step, validation, and documents cut or dropped."""
    config, packs = session.config, session.config.plan.packs_per_step
    batch_size = config.train.padded_batch_size
    share = padded_share(session.corpus.train.lengths, batch_size, config.train.seed)
    mesh = session.engine.mesh
    rank = "rank" if mesh.data_size == session.world.size else "data-parallel rank"
    dealt = (
        f"{packs} packs of at most {config.plan.capacity:,} tokens,"
        f" {session.feed.micro_batches} a {rank}, one micro-batch each"
    )
    return [
        *report_rows(report, share, batch_size, mesh.data_size, fills_packs(config.plan)),
        ("a step", dealt),
        (
            "validation",
            f"{len(session.corpus.validation):,} documents, {session.corpus.validation.num_tokens:,} tokens",
        ),
        *corpus_notes(session.corpus),
    ]


def stream_rows(session: Session) -> Rows:
    """Return the rows of a plan whose documents arrive during training."""
    corpus, plan = session.corpus, session.config.plan
    held = corpus.validation
    return [
        (
            "documents",
            f"those of {corpus.description}; the run ends after them, or after {session.steps:,} steps",
        ),
        ("planned ahead", f"{plan.window} steps, as soon as enough documents arrived"),
        ("a step", f"{plan.packs_per_step} packs of at most {plan.capacity:,} tokens"),
        ("validation", f"{len(held):,} of the first documents, {held.num_tokens:,} tokens, never trained on"),
        *corpus_notes(corpus),
    ]


def corpus_notes(corpus: Corpus) -> Rows:
    """Return the rows about documents that were cut, dropped or skipped, of a stream those until now."""
    arriving = corpus.arriving
    train_fit, skipped = (
        (corpus.train_fit, corpus.skipped) if arriving is None else (arriving.report, arriving.skipped)
    )
    fits = [("training", train_fit), ("validation", corpus.validation_fit)]
    rows = [(f"too long, {which}", fit.describe()) for which, fit in fits if fit.describe()]
    rows += [(f"mixture, {share.name}", share.describe()) for share in corpus.mixture]
    return rows + [("skipped", f"{count:,} {reason}") for reason, count in skipped.items()]

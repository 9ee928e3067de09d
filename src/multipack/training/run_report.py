"""The output of a run: the header, from which the run can be understood later, and the closing report."""

from __future__ import annotations

import math
import platform
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import multipack
from multipack.data.text.skipped import counted
from multipack.data.views.corpus import Corpus
from multipack.hub import hub_name
from multipack.ops.attention.table import BACKENDS, backend_index
from multipack.parallel.world import hosts
from multipack.planning.report import PlanReport, padded_share, report
from multipack.reports.console import LINE, Detail, folded, wrapped
from multipack.run import resume_command
from multipack.shapes.adapter import AdapterConfig
from multipack.training.metrics import LEGEND, SOMETIMES, loss_text
from multipack.training.optimizer import meta_parameters, optimizer_text, schedule_text
from multipack.training.precision import DTYPES
from multipack.training.run_config import Config
from multipack.training.trainer import Trainer

if TYPE_CHECKING:
    from multipack.reports.summary import Rows
    from multipack.training.compare import Comparison

HEADER_LINES = 8
"""Lines that a run prints before the last line of a brief header, which counts the notes beyond them.

The evaluation before the first step adds a line."""


def print_header(run: Trainer, seconds: float) -> None:
    """Print model, documents, plan and device; building the run took `seconds`.

    With `log.verbose`, also everything that the run resolved, the planner's report, and the legend of metrics.
    """
    console = run.console
    rows, measured = header_rows(run), measure_plan(run) if console.enabled else None
    if run.files.log is not None:
        run.files.log.event("start", start_record(run, rows, measured))
    if run.step >= run.steps:
        console.line(f"\nnothing to train: the run has taken {run.step} steps; raise train.steps to continue")
        return
    start = (
        f"continuing after step {run.step:,} of {run.steps:,}"
        if run.step
        else f"starting {counted(run.steps, 'steps')}"
    )
    start = f"start-up time {seconds:.1f} s; {start}"
    if run.config.log.verbose:
        _print_details(run, rows, measured)
        for note in run.notes:
            console.paragraph(f"note: {note}")
        console.line(start)
    elif console.enabled:
        brief = brief_rows(run, dict(rows), measured)
        for name, text in brief:
            console.line(f"  {name:<9}  {wrapped(text, LINE, 13)}")
        notes = [f"note: {note}" for note in run.notes if not isinstance(note, Detail)]
        lines, left = folded([*_left_out(run.corpus), *notes], HEADER_LINES - console.printed)
        for line in lines:
            console.line(line)
        more = f"; log.verbose=true prints {counted(left, 'more notes') if left else 'more'}"
        whole = f"{start} in {run.run.path}{more}"
        console.line(whole if len(whole) <= LINE else start + more)


def _print_details(run: Trainer, rows: Rows, measured: tuple[PlanReport, float] | None) -> None:
    """Print the whole header, the report of the plan and the legend of metrics."""
    console, config = run.console, run.config
    console.section("run", rows)
    if console.enabled:
        console.section("plan", plan_rows(run, measured))
    several = run.mesh.data_size > 1
    there = {"time_spread": several, "dtc": several}
    there["skipped"] = config.train.dtype == "fp16"
    legend = LEGEND | dict(run.objective.legend) | run.callbacks.legend
    legend |= {name: SOMETIMES[name] for name in there if there[name]}
    console.table("legend", ["metric", "meaning"], list(legend.items()))


def brief_rows(run: Trainer, rows: dict[str, str], measured: tuple[PlanReport, float] | None) -> Rows:
    """The brief header, chosen from the rows of `header_rows` and the result of `measure_plan`."""
    config, corpus = run.config, run.corpus
    plan = f"{counted(config.plan.packs_per_step, 'packs')} of {config.plan.capacity:,} tokens a step"
    held = f"; {len(corpus.validation):,} for validation" if len(corpus.validation) else ""
    documents, _, form = rows["corpus"].partition(" (")
    if measured is not None:
        found, share = measured
        filled = "real tokens over slots" if found.slots < found.tokens else "filled"
        plan += f": {found.efficiency:.1%} {filled} (padded rows: {share:.1%})"
        plan += (
            f"; {counted(found.dropped_documents, 'documents')} dropped" if found.dropped_documents else ""
        )
    ranks = f"{rows['world size']} on {rows['device']}, {config.train.dtype}"
    divided = rows["parallel"].removeprefix("none: ")
    parallel = "" if divided == "one process" else f"; {divided}"
    start = (
        f", from {hub_name(config.train.init_from)[0]}"
        if config.train.init_from and run.resumed is None
        else ""
    )
    return [
        (
            "model",
            f"{rows['model'].partition(', ')[0]}, {rows['parameters'].partition(' ')[0]} parameters{start}",
        ),
        *((name, rows[name].partition(";")[0]) for name in ("adapter",) if name in rows),
        ("documents", documents + held + (f" ({form}" if form else "")),
        ("plan", plan),
        ("device", f"{ranks}{parallel}, {rows['backend'].partition(', ')[2]}"),
        ("optimizer", f"{rows['optimizer'].partition(';')[0]}: {rows['learning rate']}"),
    ]


def _left_out(corpus: Corpus) -> list[str]:
    """One text of the `corpus_notes` on skipped and too long documents; empty list without such notes."""
    notes = corpus_notes(corpus)
    texts = [text for name, text in notes if name == "skipped"]
    texts += [f"{text} ({name.partition(', ')[2]})" for name, text in notes if name.startswith("too long")]
    return [f"left out or changed: {'; '.join(texts)}"] if texts else []


def print_result(run: Trainer, stopped_by: signal.Signals | None, comparison: Comparison | None) -> None:
    """Print how the run ended, and where its files are."""
    from multipack.reports.run_data import RunData
    from multipack.reports.run_page import loss_curve, write_page

    console, folder = run.console, run.run
    if run.corpus.arriving is not None:
        notes = corpus_notes(run.corpus) + [("note", text) for text in run.corpus.arriving.warnings]
        if notes:
            console.section("documents that arrived", notes)
    if run.ending and stopped_by is None:
        console.line(f"\nended after step {run.step} of {run.steps}: {run.ending}")
    if stopped_by is not None:
        console.line(
            f"\n{stopped_by.name}: saved after step {run.step} of {run.steps}; resume with"
            f" `{resume_command(folder.path)}`"
        )
    if comparison is not None:
        console.section("cost of padding (measured in this run)", _comparison_rows(comparison))
    rows: list[tuple[str, str | Path]] = [("config", folder.config), ("metrics", folder.metrics)]
    if folder.samples.is_file() and folder.samples.stat().st_size:
        rows.append(("samples", folder.samples))
    if folder.latest.is_file():
        rows.append(("checkpoint", folder.latest_checkpoint()))
    if run.corpus.arriving is None:  # arriving documents may never become a store
        rows.append(("token store", run.corpus.store_path))
    console.section("written", [(name, str(path)) for name, path in rows])
    if comparison is not None and run.files.log is not None:
        console.line("\nloss by step\n" + "\n".join(loss_curve(RunData(folder.path), LINE)))
    last = []
    if run.val_loss is not None and run.evaluated == run.step:
        found = [
            (name.replace("_", " "), run.val_metrics.get(f"val_{name}")) for name in run.objective.last_line
        ]
        found += run.val_losses.items()
        shown = [f"{name} {value:.4f}" for name, value in found if value is not None]
        loss = loss_text(run.val_loss, tokens=not run.objective.legend)
        last = [wrapped(f"{', '.join([f'final {loss}', *shown])} after {run.step} steps", LINE)]
    if run.files.log is not None:
        reason = stopped_by.name if stopped_by is not None else run.ending
        run.files.log.event("end", end_record(run, reason, comparison))
        last.append(f"page of this run: {write_page(folder)}")
    console.line("\n" + "\n".join(last))


def end_record(run: Trainer, reason: str, comparison: Comparison | None = None) -> dict[str, Any]:
    """The record of a process's end in history.jsonl; `reason` is empty after the last step."""
    record: dict[str, Any] = {"step": run.step, "reason": reason}
    if comparison is not None:
        record["comparison"] = asdict(comparison)
    if run.world.size > 1:
        record |= run.callbacks.ending()
    return record | run.feed.ending


def header_rows(run: Trainer) -> Rows:
    """The device, the software, the model, the optimizer and the data of a run."""
    world, config, shape = run.world, run.config, run.shape
    parameters = meta_parameters(run.engine.shapes, run.engine.saved)
    threads = torch.get_num_threads()
    cpu = counted(threads, "threads")
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else cpu
    style = "Llama style" if shape.positions == "rope" else "GPT-2 style"
    if shape.family:
        from multipack.shapes.families import BY_TYPE

        style = BY_TYPE[shape.family].title
    style = f"{config.model.architecture} in transformers" if shape.architecture else style
    count = sum(map(math.prod, _shapes(run).values()))
    tokenizer = run.corpus.tokenizer
    return [
        ("device", f"{world.device} ({device})"),
        ("backend", f"{world.backend}, attention {_attention_backend(run)}"),
        ("world size", counted(world.size, "processes")),
        ("parallel", config.parallel.text(world.size)),
        ("hosts", ", ".join(hosts(world))),
        ("launcher", f"{world.launcher}: {world.command}"),
        (
            "versions",
            f"multipack {multipack.__version__}, Python {platform.python_version()}, torch {torch.__version__},"
            f" numpy {np.__version__}",
        ),
        (
            "model",
            f"{style}, {shape.layers} layers, width {shape.d_model}, {shape.heads} heads"
            f" ({shape.kv_heads} kv), feed-forward {shape.d_ff}, vocabulary {shape.vocabulary_size:,}",
        ),
        ("parameters", f"{count:,}{' in fp32' if run.engine.saved is None else ''}"),
        *_adapter_rows(run),
        ("execution", _execution(config)),
        ("optimizer", optimizer_text(parameters, config.optimizer)),
        ("learning rate", schedule_text(config.optimizer, run.steps, run.feed.targets_per_step)),
        ("seed", str(config.train.seed)),
        ("corpus", run.corpus.description),
        ("corpus hash", run.corpus.corpus_hash[:16]),
        ("tokenizer", f"{tokenizer.vocabulary_size:,} tokens, hash {tokenizer.hash[:16]}"),
        ("run directory", str(run.run.path)),
    ]


def _shapes(run: Trainer) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the model's own parameters; with adapters an engine has theirs, and quantized bytes."""
    if run.engine.saved is None:
        return run.engine.shapes
    from multipack.models.huggingface import parameter_shapes

    return parameter_shapes(run.shape)


def _adapter_rows(run: Trainer) -> Rows:
    """Rows on adapters: trained matrices and frozen weights."""
    adapter, shapes, saved = run.config.adapter, run.engine.shapes, run.engine.saved
    if saved is None:
        return []
    trained = sum(math.prod(shapes[name]) for name in saved)
    count = trained + sum(math.prod(shape) for name, shape in _shapes(run).items() if name not in saved)
    prefix, form = (adapter.format.prefix, f" in {adapter.format.title}") if adapter.format else ("", "")
    kind = prefix + {"lora": "LoRA", "dora": "DoRA"}[adapter.name]
    stabilized = ", rank-stabilized" if adapter.rank_stabilized else ""
    matrices = sum(name.endswith(".lora_a") for name in saved)
    whole = f", and {', '.join(adapter.train)} whole" if adapter.train else ""
    held = "" if adapter.format else f", matrices in {run.config.train.dtype}"
    return [
        (
            "adapter",
            f"{kind} of rank {adapter.rank}, alpha {adapter.alpha:g}{stabilized}, on {matrices} matrices{form}{whole}:"
            f" {trained:,} parameters trained ({100 * trained / count:.2g} %)"
            f"{_quantized_text(adapter, shapes, count - trained)}",
        ),
        ("frozen weights", " at ".join(filter(None, hub_name(adapter.base))) + held),
    ]


def _quantized_text(adapter: AdapterConfig, shapes: Mapping[str, tuple[int, ...]], frozen: int) -> str:
    """Number and format of the quantized parameters, as text."""
    if adapter.format is None:
        return ""
    from multipack.ops.quantized import part_names

    codes = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(part_names("")[0]))
    count, form = codes * adapter.format.per_byte, adapter.format.text(adapter.double_quantize)
    return f"; {count:,} frozen ones are in {form}, {frozen - count:,} are not quantized"


def _execution(config: Config) -> str:
    """One line on computation: precision, shapes of packs, compilation, activation checkpointing."""
    train, slots = config.train, config.pack_slots
    parts = [
        f"forward passes in {train.dtype}",
        f"packs padded to {slots:,} slots" if slots else "packs of varying sizes",
        "blocks compiled" if train.compile == "true" else "not compiled",
    ]
    parts += [f"activation checkpointing: {train.recompute}"] if train.recompute != "none" else []
    parts += [f"{train.tiles} tiles"] if train.tiles > 1 else []
    return ", ".join(parts + ["deterministic"] * train.deterministic)


def measure_plan(run: Trainer) -> tuple[PlanReport, float] | None:
    """The report of the plan, and the share of tokens in the slots of padded batches; None for a stream."""
    if run.feed.plan is None:
        return None
    share = padded_share(run.corpus.train.lengths, run.config.train.padded_batch_size, run.config.train.seed)
    return report(run.feed.plan, run.mesh.data_size, run.config.parallel.sync), share


def start_record(run: Trainer, rows: Rows, measured: tuple[PlanReport, float] | None) -> dict[str, Any]:
    """The record of a process's start in history.jsonl, with the rows of `header_rows`."""
    _, share = measured or (None, None)
    return {
        "step": run.step,
        "steps": run.steps,
        "world_size": run.world.size,
        "parallel": run.config.parallel.text(run.world.size),
        "run": rows,
        "plan": _report_rows(run, measured, ()) if measured else [],
        "padded_share": share,
        "padded_batch_size": run.config.train.padded_batch_size,
        "notes": [note for note in run.notes if not isinstance(note, Detail)],
        "details": [note for note in run.notes if isinstance(note, Detail)],
        "left_out": [f"{name}: {text}" for name, text in corpus_notes(run.corpus)],
    }


def _report_rows(run: Trainer, measured: tuple[PlanReport, float], advice: Sequence[str]) -> Rows:
    from multipack.reports.summary import report_rows

    found, share = measured
    config, ranks = run.config, run.mesh.data_size
    return report_rows(found, share, config.train.padded_batch_size, ranks, config.plan, advice)


def plan_rows(run: Trainer, measured: tuple[PlanReport, float] | None) -> Rows:
    """The report of the plan, packs of a step, and documents that were cut or skipped."""
    feed, config, corpus, ranks = run.feed, run.config, run.corpus, run.mesh.data_size
    if feed.plan is None or measured is None:
        ends = f"those of {corpus.description}; the run ends with them, or after {run.steps:,} steps"
        ahead = f"{config.plan.window} steps, as soon as the documents that fill them are there"
        rows = [("documents", ends), ("planned ahead", ahead)]
    else:
        from multipack.planning.advice import advise

        rows = _report_rows(run, measured, advise(feed.plan, measured[0]))
    rank = "rank" if ranks == run.world.size else "data-parallel rank"
    step = (
        f"{counted(config.plan.packs_per_step, 'packs')} of at most {config.plan.capacity:,} tokens,"
        f" {feed.micro_batches} per"
        f" {rank}, one micro-batch each"
    )
    held = (
        f"{counted(len(corpus.validation), 'documents')}, {counted(corpus.validation.num_tokens, 'tokens')}"
    )
    held += f": {corpus.validation_files}" if corpus.validation_files else ""
    return [*rows, ("step", step), ("validation", held), *corpus_notes(corpus)]


def corpus_notes(corpus: Corpus) -> Rows:
    """Rows on documents that were cut, dropped or skipped; of a stream only the documents so far."""
    arriving = corpus.arriving
    train_fit, skipped = corpus.train_fit, corpus.skipped
    if arriving is not None:
        train_fit, skipped = arriving.fit, [*arriving.noted.lines(), *skipped]
    fits = [("training", train_fit), ("validation", corpus.validation_fit)]
    rows = [(f"too long, {which}", fit.describe()) for which, fit in fits if fit.describe()]
    rows += [(f"mixture, {share.name}", share.describe()) for share in corpus.mixture]
    return rows + [("skipped", line) for line in skipped]


def _comparison_rows(found: Comparison) -> Rows:
    return [
        ("packed", f"{found.packed_tokens_per_second:,.0f} tokens/s"),
        (
            "padded",
            f"{found.padded_tokens_per_second:,.0f} tokens/s (random batches of {found.batch_size},"
            f" {100 / found.pad_factor:.1f} % of the slots hold tokens)",
        ),
        ("packed / padded", f"{found.ratio:.2f} x (over {found.steps} pairs of steps)"),
        ("pad factor", f"{found.pad_factor:.2f} (slots that padding computes per token)"),
    ]


def _attention_backend(run: Trainer) -> str:
    """Name of the attention backend in effect."""
    config, shape = run.config, run.shape
    if shape.architecture:
        return "multipack in transformers"
    if config.parallel.context > 1 and config.parallel.context_method != "ulysses":
        return "planned"
    # Fields of `Request`: causal attention, whose results are not merged over ranks.
    properties = DTYPES[config.train.dtype], shape.head_width, shape.explicit_scores, True, False
    compiled = config.train.compile == "true"
    return BACKENDS[backend_index(config.model.attention, run.world.device, *properties, compiled)].name

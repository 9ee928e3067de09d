"""Which causal architectures of transformers keep packed documents apart.

    python benchmarks/leak_census.py                 # all, a few minutes: docs/leak-census.md, results/leak_census.json
    python benchmarks/leak_census.py llama opt       # some, printed only

Builds every architecture of MODEL_FOR_CAUSAL_LM_MAPPING tiny, with random weights, under eager, sdpa and this package's
attention (attn_implementation="multipack"), and runs the isolation probe (`multipack probe`) on each in two ways:

    plain     input_ids and position_ids, and the model's own use_cache, as flattening collators give them
    packed    the conventions of multipack: also cu_seq_lens, max_length and seq_idx, use_cache=False

and, where packed documents leak, once more with `returns="4d_mask"`. An architecture that the probe finds clean is
checked in another way: gradients of one document's logits with respect to the embeddings of the others must be exactly
0. Those where they are not are silent leaks.

Each model runs in a child process, with limits of time and memory.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers

import contextlib
import json
import resource
import sys
import time
import warnings
from collections import Counter
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from multipack.integrations.attention_interface import register
from multipack.integrations.collator import PackedDataCollator, windows_of
from multipack.models.probe import isolation_probe
from multipack.models.probe_batch import transformers_batch
from multipack.models.tiny_models import tiny_model
from result import DOCS, parser_of, write_result

PAGE = DOCS / "leak-census.md"
SECONDS, BYTES, PARAMETERS = 60, 12 << 30, 20_000_000
"""Limits of each model."""
ATTENTIONS = ("eager", "sdpa", "multipack")


# --- one architecture, in the child process -----------------------------------------------------------


def plain_batch(documents: Any) -> dict[str, Any]:
    batch = transformers_batch(documents)
    return {name: batch[name] for name in ("input_ids", "position_ids")}


def masked(model: Any) -> Any:
    collate = PackedDataCollator("4d_mask", window=windows_of(model.config))
    return lambda documents: collate([{"input_ids": list(document)} for document in documents])


def verdict(model: Any, make_batch: Any = None) -> dict[str, str]:
    """`ok`, `refused` or `leaks`, with the cause and the text of the first finding."""
    try:
        report = isolation_probe(model, make_batch)
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return {"verdict": "refused", "cause": "refused", "text": text}
    if report.ok:
        return {"verdict": "ok"}
    finding = report.findings[0]
    is_refused = finding.cause == "refused"
    return {"verdict": "refused" if is_refused else "leaks", "cause": finding.cause, "text": finding.text}


def gradient_leak(model: Any, make_batch: Any) -> bool:
    """Whether logits of one document have a gradient in the embeddings of another one."""
    documents, held = [[11, 12, 13, 14, 15], [21, 22, 23, 24], [31, 32, 33, 34, 35, 36]], []

    def keep(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        held.append(output.detach().requires_grad_())
        return held[-1] * 1  # some models change it in place

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        batch = {name: value for name, value in make_batch(documents).items() if name != "labels"}
        logits = model.eval()(**batch).logits
    finally:
        handle.remove()
    (gradient,) = torch.autograd.grad(logits[0, 5:9].double().square().sum(), held[:1])
    return bool(gradient[0, :5].any() or gradient[0, 9:].any() or not gradient[0, 5:9].any())


def row_of(name: str) -> dict[str, Any]:
    """The verdicts of an architecture."""
    from transformers import CONFIG_MAPPING

    row: dict[str, Any] = {"name": name}
    for attention in ATTENTIONS:
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in tiny_model(CONFIG_MAPPING[name](), "eager").parameters())
            if size > PARAMETERS:
                return row | {"not_built": f"{size:,} parameters even when tiny"}
            model = tiny_model(CONFIG_MAPPING[name](), attention)
        except Exception as error:
            if "eager" in row:
                row[attention] = {"packed": {"verdict": "absent", "why": str(error)[:200]}}
                continue
            return row | {"not_built": " ".join(str(error).split())[:160]}
        found = {"packed": verdict(model)}
        if attention != "multipack":
            found["plain"] = verdict(model, plain_batch)
        used = transformers_batch
        if found["packed"].get("cause") == "leak":
            with contextlib.suppress(ValueError):  # layers that a mask does not describe
                used = masked(model)
                found["4d_mask"] = verdict(model, used)
        if "ok" in (found["packed"]["verdict"], found.get("4d_mask", {}).get("verdict")):
            try:
                found["silent"] = gradient_leak(model, used)
            except Exception as error:
                found["silent"] = f"not checked: {' '.join(str(error).split())[:100]}"
        row[attention] = found
    return row


# --- all of them --------------------------------------------------------------------------------------


def isolated(name: str) -> dict[str, Any]:
    """The row of an architecture, from a process with limits of time and memory."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["leak_census"])
    ours, theirs = context.Pipe()
    process = context.Process(target=send_row, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else not_built(name, f"slower than {SECONDS} s")
    except EOFError:
        return not_built(name, "the process died")
    finally:
        process.kill()
        process.join()


def send_row(name: str, connection: Connection) -> None:
    """Send the row of an architecture, in the child process."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    register()
    connection.send(row_of(name))


def not_built(name: str, why: str) -> dict[str, Any]:
    return {"name": name, "not_built": why}


def census(names: list[str]) -> list[dict[str, Any]]:
    """Rows of these architectures, with progress on standard error."""
    rows = []
    for number, name in enumerate(names, 1):
        rows.append(isolated(name))
        print(f"{number}/{len(names)} {name}: {summary(rows[-1])}", file=sys.stderr, flush=True)
    return rows


# --- the page -----------------------------------------------------------------------------------------


def cell(found: dict[str, Any] | None, way: str) -> str:
    return (found or {}).get(way, {}).get("verdict", "–")


def result_of(found: dict[str, Any] | None) -> str:
    """What packing with multipack does: ok, ok with a 4D mask, or refused."""
    if found is None or found["packed"]["verdict"] == "absent":
        return "–"
    if found["packed"]["verdict"] == "ok":
        return "ok"
    return "ok with 4d_mask" if found.get("4d_mask", {}).get("verdict") == "ok" else "refused"


def summary(row: dict[str, Any]) -> str:
    if "not_built" in row:
        return f"not built ({row['not_built']})"
    return " | ".join(f"{attention}: {result_of(row.get(attention))}" for attention in ATTENTIONS)


def reason(row: dict[str, Any]) -> str:
    """Why an architecture is refused, or needs a mask; empty if it is ok."""
    for attention in ATTENTIONS:
        packed = row.get(attention, {}).get("packed", {})
        if packed.get("text"):
            return packed["text"].replace("the model refuses the packed batch: ", "").replace("|", "/")
    return ""


def counts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Number of architectures by result; an architecture counts as its best attention."""
    built = [row for row in rows if "not_built" not in row]
    order = ("ok", "ok with 4d_mask", "refused", "–")
    best = Counter(min((result_of(row.get(a)) for a in ATTENTIONS), key=order.index) for row in built)
    leaks = sum(any(row[a].get("plain", {}).get("verdict") == "leaks" for a in ATTENTIONS) for row in built)
    silent = [row["name"] for row in built if any(row[a].get("silent") is True for a in ATTENTIONS)]
    return {
        "built": len(built),
        "not_built": len(rows) - len(built),
        "plain_leaks": leaks,
        "ok": best["ok"],
        "ok_with_4d_mask": best["ok with 4d_mask"],
        "refused": best["refused"],
        "silent": silent,
    }


def page(rows: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """The text of docs/leak-census.md."""
    total = counts(rows)
    lines = [
        "# Which architectures keep packed documents apart",
        "",
        "Generated by `python benchmarks/leak_census.py`. Every causal architecture of transformers that can be built"
        f" tiny with random weights ({total['built']}), under eager, sdpa and our attention, on a CPU, with"
        f" transformers {versions['transformers']} and torch {versions['torch']}.",
        "",
        "- **plain**: `input_ids` and `position_ids` only, with the model's own `use_cache`, as flattening collators"
        f" give them in a loop of one's own: documents leak, silently, in {total['plain_leaks']} architectures.",
        "- **multipack**: the batch of our collators (`cu_seq_lens`, `seq_idx`, no mask, `use_cache=False`):"
        f' {total["ok"]} are ok, {total["ok_with_4d_mask"]} with `returns="4d_mask"`, and the model or probe refuses'
        f" {total['refused']}, under the best of the attentions. Silent leaks: {len(total['silent'])}.",
        "",
        "An architecture is *ok* if no document changes the outputs of another one, if each is equal to itself alone,"
        " and if gradients of one document in the embeddings of the others are exactly 0. *Refused*: the model or the"
        " probe raises the error of the last column. A mask is named only where the others fail. With flash attention"
        " and on a GPU results differ: `multipack probe MODEL --device cuda` checks the model at hand.",
        "",
        "| architecture | plain: eager | plain: sdpa | packed: eager | packed: sdpa | packed: multipack | why |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row["name"]):
        if "not_built" not in row:
            cells = [cell(row.get(a), "plain") for a in ATTENTIONS[:2]] + [
                result_of(row.get(a)) for a in ATTENTIONS
            ]
            lines.append(f"| {row['name']} | {' | '.join(cells)} | {reason(row)} |")
    lines += [
        "",
        "Not built (the default configuration cannot be made tiny by rules, or needs another package):",
        "",
    ]
    lines += [f"- {row['name']}: {row['not_built'].replace('|', '/')}" for row in rows if "not_built" in row]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the census."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = parser_of(__doc__, "leak_census")
    parser.add_argument("names", nargs="*", help="architectures; none = all, and write the page")
    arguments = parser.parse_args()
    began = time.monotonic()
    rows = census(arguments.names or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    total = counts(rows) | {"seconds": round(time.monotonic() - began)}
    print(json.dumps(total, indent=1))
    if not arguments.names:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        PAGE.write_text(page(rows, versions))
        write_result(arguments.out, {"versions": versions, "counts": total, "rows": rows})


if __name__ == "__main__":
    main()

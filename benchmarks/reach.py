"""How many of Axolotl's example configurations that pack resolve completely in our trainer, and what the others lack.

    python benchmarks/reach.py      # of ../shared/data/axolotl/examples.jsonl: results/reach.json, docs/axolotl.md

Each is translated as by `multipack import-config`, and counts as resolved if it names no key that would change what is
trained. `our decoder` counts the models that it computes; `with model=hf:` also those that are trained with the code of
transformers. Nothing is downloaded, and nothing is trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from multipack.imports.imported import Imported, translate_keys
from result import DOCS, parser_of, write_between, write_result

EXAMPLES = Path(__file__).parents[1].parent / "shared" / "data" / "axolotl" / "examples.jsonl"
ASKED = 0.6


def count(examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures over configurations with `path` and `config`."""
    found = {
        each["path"]: translate_keys(each["config"])
        for each in examples
        if each["config"].get("sample_packing")
    }
    resolved = {path: one for path, one in found.items() if not one.lacking}
    own = [path for path, one in resolved.items() if not _is_foreign(one)]
    return {
        "examples": len(examples),
        "packing": len(found),
        "own_decoder": len(own),
        "with_hf": len(resolved),
        "more_bits": sum(map(_has_more_bits, resolved.values())),
        "more_bits_of_products": sum(map(_has_other_products, resolved.values())),
        "share": round(len(resolved) / max(len(found), 1), 4),
        "lacking": {path: one.lacking for path, one in found.items() if one.lacking},
    }


def _is_foreign(found: Imported) -> bool:
    return str(found.settings.get("model", "")).startswith("hf:")


def _noted(found: Imported, key: str) -> bool:
    """Whether a key is honored in another way."""
    return key in found.left or " (" in found.translated.get(key, "")


def _has_more_bits(found: Imported) -> bool:
    """Whether optimizer states have more bits than were asked for."""
    return "bits instead of" in found.translated.get("optimizer", "")


def _has_other_products(found: Imported) -> bool:
    """Whether products have more bits than were asked for, with weights and states as asked for."""
    return not _has_more_bits(found) and any(_noted(found, key) for key in ("load_in_8bit", "fp8"))


def page(figures: dict[str, Any]) -> str:
    """The part of docs/axolotl.md with the figures."""
    packing, strict = figures["packing"], figures["with_hf"] - figures["more_bits"]
    rows = [
        "| | examples | share |",
        "|---|---:|---:|",
        f"| that pack | {packing} | |",
        "| resolve completely, weights and optimizer states in the bits asked for"
        f" | {strict} | {strict / packing:.0%} |",
        f"| of these, products in more bits than asked for | {figures['more_bits_of_products']} | |",
        f"| resolve completely, some states in more bits | {figures['with_hf']} | {figures['share']:.0%} |",
        f"| of these, computed by our decoder (others: `model=hf:`) | {figures['own_decoder']} | |",
        "",
        "What the others lack:",
        "",
        "| example | keys |",
        "|---|---|",
    ]
    for path, lacking in sorted(figures["lacking"].items()):
        reasons = "; ".join(f"`{key}`: {' '.join(why.split())}" for key, why in lacking.items())
        rows.append(f"| {path.removeprefix('examples/')} | {reasons.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def main() -> None:
    """Count, print, and write figures and page."""
    parser = parser_of(__doc__, "reach")
    parser.add_argument("--examples", type=Path, default=EXAMPLES, help="JSON lines with path and config")
    options = parser.parse_args()
    if not options.examples.is_file():
        raise SystemExit(f"{options.examples} is not here: no examples to count")
    figures = count([json.loads(line) for line in options.examples.open()])
    print(page(figures))
    write_result(options.out, figures)
    write_between(DOCS / "axolotl.md", "reach", page(figures))


if __name__ == "__main__":
    main()

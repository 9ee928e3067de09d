"""The command line of a benchmark that makes tables: measures them, writes their page."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from planning_tables.table import Asked, Table, aligned, grid, markdown, verdicts
from result import DOCS, parser_of, write_between, write_result

LONG = 50  # rows; longer tables are folded in the page


@dataclass(frozen=True)
class Suite:
    """The tables of results/NAME.json and of docs/NAME.md.

    Attributes:
        name: of the files.
        tables: by name; each is called with whether it is to use less data.
        measured_on: first sentences of the page, from the description of the machine.
        document: of docs/, if it is not NAME.md.
    """

    name: str
    tables: dict[str, Callable[[bool], Table]]
    measured_on: Callable[[dict[str, Any]], str]
    document: str = ""

    def main(self, doc: str | None) -> None:
        """Run the command line; `doc` is its help."""
        parser = parser_of(doc, self.name)
        parser.add_argument(
            "--table", action="append", choices=list(self.tables), help="only this; repeatable"
        )
        parser.add_argument("--quick", action="store_true", help="less work: not for figures to quote")
        parser.add_argument("--page", action="store_true", help="write the last figures into the page")
        options = parser.parse_args()
        if options.page:
            saved = json.loads(options.out.read_text(encoding="utf-8"))
            write_between(DOCS / f"{self.document or self.name}.md", "tables", self.page(saved))
            return
        tables = [self.measure(name, options.quick) for name in options.table or self.tables]
        print(f"\nasked and reached\n\n{aligned(verdicts(asked_of(tables)))}\n\n{summary(tables)}")
        is_whole = not (options.table or options.quick)
        if is_whole or options.out != parser.get_default("out"):
            figures = {"quick": options.quick, "tables": [asdict(table) for table in tables]}
            write_result(options.out, figures)

    def measure(self, name: str, quick: bool) -> Table:
        """Make and print a table, with its time and the machine's load before and after."""
        before, began = os.getloadavg()[0], time.perf_counter()
        table = self.tables[name](quick)
        seconds = time.perf_counter() - began
        table.how = f"{seconds:.0f} s, load {before:.3g} before and {os.getloadavg()[0]:.3g} after"
        print(f"\n{table.name}: {table.title} ({table.how})\n\n{aligned(grid(table))}")
        if table.asked:
            print(f"\n{aligned(verdicts(table.asked))}")
        print("".join(f"  {note}\n" for note in table.notes))
        return table

    def page(self, saved: dict[str, Any]) -> str:
        """Stored figures in Markdown."""
        tables = [Table.from_dict(values) for values in saved["tables"]]
        less = " With --quick: less data." if saved["quick"] else ""
        parts = [self.measured_on(saved["machine"]) + less]
        parts += [f"Figures {summary(tables)}:", markdown(verdicts(asked_of(tables)))]
        for table in tables:
            rows = markdown(grid(table))
            if len(table.rows) > LONG:
                rows = f"<details><summary>{len(table.rows)} rows</summary>\n\n{rows}\n\n</details>"
            title = table.title[0].upper() + table.title[1:]
            parts += [f"### {table.name}\n\n{title}{table.how and f' ({table.how})'}.", rows]
            parts += ["\n".join(f"- {note}." for note in table.notes)] if table.notes else []
        return "\n\n".join(parts)


def asked_of(tables: list[Table]) -> list[Asked]:
    """The asked figures of all tables."""
    return [each for table in tables for each in table.asked]


def summary(tables: list[Table]) -> str:
    """The number of asked figures that were reached."""
    every = asked_of(tables)
    return f"asked: {sum(each.met is True for each in every)} of {len(every)} reached"

"""Results of the isolation probe: causes with remedies, and how much documents change each other."""

from __future__ import annotations

from dataclasses import dataclass

from multipack.shapes import RotationLimit


@dataclass(frozen=True)
class ProbeFinding:
    """Something that is wrong, and how to mend it.

    Attributes:
        cause: a word for programs: `leak` and `difference`; of the batch, `positions`, `bounds`, `segments`, `border`
            and `labels`; of the model, `rotation`, `future`, `state`, `not_finite` and `refused`.
        text: what is wrong, and where.
        remedy: what to do next.
    """

    cause: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.text}; {self.remedy}"


@dataclass(frozen=True)
class IsolationReport:
    """Result of a probe.

    Attributes:
        leaks: (changed document, affected document), counted from 0 → largest change of its outputs, relative to its
            largest output.
        differences: for each document, largest difference between packed and alone, relative in the same way.
        findings: what is wrong and how to mend it; empty if all is well.
        tolerance: largest relative change that counts as none.
        limit: documents up to this length are isolated; None = all are.
    """

    leaks: dict[tuple[int, int], float]
    differences: tuple[float, ...]
    findings: tuple[ProbeFinding, ...]
    tolerance: float
    limit: RotationLimit | None = None

    @property
    def ok(self) -> bool:
        """Whether documents are isolated, equal to themselves alone, and well labeled."""
        return not self.findings

    @property
    def causes(self) -> tuple[str, ...]:
        """The words of the findings' causes."""
        return tuple(finding.cause for finding in self.findings)

    def check(self) -> IsolationReport:
        """Return the report.

        Raises:
            ValueError: something is wrong; the message is the first finding.
        """
        if self.findings:
            more = f" (and {len(self.findings) - 1} more: multipack probe)" if self.findings[1:] else ""
            effect = ""
            if self.leaks:
                (source, target), size = max(self.leaks.items(), key=lambda item: item[1])
                effect = f"document {source + 1} changes document {target + 1} by {size:.2g} of its outputs; "
            raise ValueError(f"packed documents are not isolated: {effect}{self.findings[0]}{more}")
        return self

    def __str__(self) -> str:
        if self.ok:
            largest = max(self.differences, default=0.0)
            number = len(self.differences)
            until = f"; {self.limit}, and others of their row too" if self.limit is not None else ""
            return f"isolated: {number} documents, each equal to itself alone ({largest:.1g} of its outputs){until}"
        lines = [
            f"leak: document {source + 1} → {target + 1}, {size:.2g} of its outputs"
            for (source, target), size in sorted(self.leaks.items())
        ]
        lines += [
            f"difference: document {number} packed and alone, {size:.2g} of its outputs"
            for number, size in enumerate(self.differences, 1)
            if not size <= self.tolerance
        ]
        for finding in self.findings:
            lines += [f"{finding.cause}: {finding.text}", f"  → {finding.remedy}"]
        return "\n".join(lines)

"""The prompt of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca): an instruction, and its input if it has one."""

from __future__ import annotations

_TASK = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
_PAIRED = _TASK.format(", paired with an input that provides further context")


def alpaca_prompt(instruction: str, more: str = "") -> str:
    """The prompt of an instruction and its input, which may be empty."""
    if more.strip():
        return f"{_PAIRED}\n\n### Instruction:\n{instruction}\n\n### Input:\n{more}\n\n### Response:\n"
    return f"{_TASK.format('')}\n\n### Instruction:\n{instruction}\n\n### Response:\n"

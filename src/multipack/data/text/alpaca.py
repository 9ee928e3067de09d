"""Prompts of Alpaca's records, an instruction and its input, in the styles that Axolotl names.

`instruct` is the prompt of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca), with which its data are trained.
"""

from __future__ import annotations

import re

from multipack.data.text.data_config import AlpacaPrompt
from multipack.data.text.texts import TextPart

TASK = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
PAIRED = ", paired with an input that provides further context"
STYLES: dict[AlpacaPrompt, tuple[str, str, str]] = {
    "instruct": (
        "{system}\n\n",
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Response:\n",
    ),
    "chat": (
        "SYSTEM: {system}\n",
        "USER: {instruction}\n{input}\nASSISTANT:",
        "USER: {instruction}\nASSISTANT:",
    ),
    "chatml": (
        "<|im_start|>system\n{system}<|im_end|>\n",
        "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi": (
        "<|system|>\n{system}<|end|>\n",
        "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    ),
}
"""Style → the task, and the prompt of a record with an input and without one."""
_SPECIAL = re.compile(r"(<\|\w+\|>)")


def alpaca_prompt(style: AlpacaPrompt, instruction: str, more: str = "") -> list[TextPart]:
    """The prompt of an instruction and its input, which may be empty; only names in the style are special tokens."""
    task, paired, alone = STYLES[style]
    more = more if more.strip() else ""
    values = {"system": TASK.format(PAIRED if more else ""), "instruction": instruction, "input": more}
    pieces = _SPECIAL.split(task + (paired if more else alone))
    return [
        TextPart(piece if number % 2 else piece.format(**values), False, number % 2 == 1)
        for number, piece in enumerate(pieces)
        if piece
    ]

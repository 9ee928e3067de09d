"""Formats of frozen matrices (`adapter.quantize`): their rules and texts. No torch.

A format is a name, a row in `FORMATS`, and the class in ops/ that the row names, which computes with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NF4_BLOCK = 64
"""Numbers of a row that share a scale in NF4."""
NF4_SCALES_BLOCK = 256
"""Scales of NF4 that share a float32 step under double quantization."""
FormatName = Literal["nf4", "int8"]


@dataclass(frozen=True)
class FrozenFormat:
    """A format of frozen matrices.

    Attributes:
        title: its name in texts.
        matrix: `module:class` of a matrix in this format, a subclass of `Quantized`.
        per_byte: numbers in a byte of codes.
        block: rows are a multiple of this number, also on ranks that divide them; 1 = of any length.
        unpacked: temporary bytes of a number while its matrix is dequantized.
        loading: arguments of transformers' BitsAndBytesConfig with which a model computes the same; empty = none do.
        quantizes_scales: whether `adapter.double_quantize` applies.
        prefix: of the names of adapters beside such matrices: QLoRA.
    """

    title: str
    matrix: str
    per_byte: int
    block: int
    unpacked: int
    loading: str = ""
    quantizes_scales: bool = False
    prefix: str = ""

    def equal_outputs(self, double: bool) -> str:
        """How to load the base in transformers, so that it computes as in the adapter's training."""
        if not self.loading:
            return "use --merge: transformers loads no weights in this format"
        return f"load the base with BitsAndBytesConfig({self.loading.format(double=double)})"

    def text(self, double: bool) -> str:
        """Its name, and how its scales are held."""
        scales = "double quantization" if self.quantizes_scales and double else "scales in fp32"
        return f"{self.title} with {scales}"


FORMATS: dict[str, FrozenFormat] = {
    "nf4": FrozenFormat(
        title="NF4",
        matrix="multipack.ops.nf4:Nf4",
        per_byte=2,
        block=NF4_BLOCK,
        unpacked=6,
        loading='load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant={double}',
        quantizes_scales=True,
        prefix="Q",
    ),
    "int8": FrozenFormat(
        title="INT8",
        matrix="multipack.ops.int8:Int8",
        per_byte=1,
        block=1,
        unpacked=8,
        loading="load_in_8bit=True",
    ),
}
"""`adapter.quantize` → the format of frozen matrices."""

"""AdamW whose moments take 2 bytes or 1 byte of an element instead of 4.

    bf16   bfloat16
    8bit   float8 (1 sign, 4 exponent and 3 mantissa bits) with a scale for every 256 elements of a row, after Dettmers
           et al. 2022 (arXiv:2110.02861), section 2; vectors keep float32 moments

Updates are computed in float32, some rows at a time. Moments are rounded stochastically, up or down with a mean equal
to the exact value: to the nearest, a change smaller than half a unit is lost in every step, and a second moment with
beta2=0.999 never decays. The noise follows from the step and the name of the parameter alone, so that replicas stay
equal and a resumed run is the same.

8-bit second moments are stored as roots, which keeps elements 10^10 times smaller than the largest of their block: a
second moment of 0 would make an update infinite. The paper's own codes are finer for large elements, but have to be
searched in a table for every element, which takes three quarters of a step on a CPU.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.parallel.state import local
from multipack.training.optimizer import Groups
from multipack.training.settings import OptimizerConfig

Moments = Literal["bf16", "8bit"]

FLOAT8 = torch.float8_e4m3fn
BLOCK = 256
"""Elements of a row with one scale: 1.6 % more bytes. The paper has 2,048; small blocks confine large values."""
CHUNK = 1 << 22
"""Elements updated at a time, which limits temporary tensors to about 150 MB."""


def adamw_bf16(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW whose moments are bfloat16, over groups of parameters."""
    return CompactAdamW(groups, "bf16", **config.adam_options)


def adamw_8bit(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW whose moments are float8, over groups of parameters."""
    return CompactAdamW(groups, "8bit", **config.adam_options)


class CompactAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) with compact moments.

    State of a parameter: `step`, `exp_avg` and `exp_avg_sq`, sharded like the parameter; 8-bit moments also have
    `exp_avg_scale` and `exp_avg_sq_scale` with one column per block. Shards may divide rows, but not columns.

    Args:
        groups: groups as for torch's AdamW, with `lr`, `weight_decay`, and `names` in the order of `params`.
        moments: format of the moments.
        options: `lr`, `betas` and `eps`, the defaults of groups.
    """

    def __init__(self, groups: Groups, moments: Moments, **options: Any) -> None:
        super().__init__(list(groups) or [{"params": [], "names": []}], options)
        self._names: dict[Tensor, str] = {}
        for group in self.param_groups:
            self._names.update(zip(group["params"], group["names"], strict=True))
        self._moments: Moments = moments
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update(_empty_state(parameter, self._moments))
                    state["step"] += 1
                    self._update(parameter, state, group, self._noise(parameter, int(state["step"])))

    def _noise(self, parameter: Tensor, step: int) -> torch.Generator:
        device = local(parameter).device
        generator = self._generators.setdefault(device, torch.Generator(device))
        # A CPU's generator takes 32 bits.
        return generator.manual_seed(zlib.crc32(f"{step} {self._names[parameter]}".encode()))

    def _update(
        self, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], generator: torch.Generator
    ) -> None:
        step, (beta1, beta2), lr = int(state["step"]), group["betas"], group["lr"]
        rate, correction = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
        assert parameter.grad is not None
        tensors = {"value": parameter, "gradient": parameter.grad} | {
            name: each for name, each in state.items() if name != "step"
        }
        rows = {name: _rows(local(each)) for name, each in tensors.items()}
        size = max(1, CHUNK // max(1, rows["value"].shape[1]))
        for start in range(0, len(rows["value"]), size):
            part = {name: each[start : start + size] for name, each in rows.items()}
            gradient = part["gradient"].float()
            first = _read(part, "exp_avg").lerp_(gradient, 1 - beta1)
            second = _read(part, "exp_avg_sq").mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            root = second.sqrt().div_(correction).add_(group["eps"])
            part["value"].mul_(1 - lr * group["weight_decay"]).addcdiv_(first, root, value=-rate)
            _write(part, "exp_avg", first, generator)
            _write(part, "exp_avg_sq", second, generator)


def _empty_state(parameter: Tensor, moments: Moments) -> dict[str, Tensor]:
    state = {"step": torch.tensor(0.0)}
    codes = moments == "8bit" and parameter.dim() == 2
    dtype = torch.bfloat16 if moments == "bf16" else FLOAT8 if codes else torch.float32
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros_like(parameter, dtype=dtype)
        if codes:
            # Sharded like the parameter and on its device: under offload the mesh has another device.
            columns = parameter.detach()[:, : -(-parameter.shape[1] // BLOCK)]
            state[f"{name}_scale"] = torch.zeros_like(columns, dtype=torch.float32).contiguous()
    return state


def _rows(tensor: Tensor) -> Tensor:
    """A view of a tensor as a matrix; a vector is one row."""
    return tensor.view(tensor.shape[0], -1) if tensor.dim() >= 2 else tensor.view(1, -1)


def _read(part: dict[str, Tensor], name: str) -> Tensor:
    """Rows of a moment in a new float32 tensor."""
    values = part[name].to(torch.float32, copy=True)
    if part[name].dtype != FLOAT8:
        return values
    whole = _blocks(values).mul_(part[f"{name}_scale"].unsqueeze(-1)).flatten(1)[:, : values.shape[1]]
    return whole.square() if name == "exp_avg_sq" else whole


def _write(part: dict[str, Tensor], name: str, values: Tensor, generator: torch.Generator) -> None:
    """Store rows of a moment; changes `values`."""
    stored = part[name]
    if stored.dtype == torch.float32:
        stored.copy_(values)
    elif stored.dtype == torch.bfloat16:
        stored.copy_(_rounded(values, 16, generator))
    else:
        blocks, largest = _blocks(values.sqrt_() if name == "exp_avg_sq" else values), torch.finfo(FLOAT8).max
        scale = (blocks.abs().amax(-1) / largest).clamp_(min=torch.finfo(torch.float32).tiny)
        part[f"{name}_scale"].copy_(scale)
        rounded = _rounded(blocks.div_(scale.unsqueeze(-1)), 20, generator).clamp_(-largest, largest)
        stored.copy_(rounded.flatten(1)[:, : stored.shape[1]])


def _rounded(values: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """float32 values rounded stochastically: random lowest bits are added, carry into the others, and are cut off."""
    words = values.contiguous().view(torch.int32)
    noise = torch.randint(1 << bits, words.shape, dtype=torch.int32, device=words.device, generator=generator)
    return noise.add_(words).bitwise_and_(-(1 << bits)).view(torch.float32)


def _blocks(rows: Tensor) -> Tensor:
    """(rows, columns) → (rows, blocks, 256), filled with zeros."""
    missing = -rows.shape[1] % BLOCK
    padded: Tensor = F.pad(rows, (0, missing)) if missing else rows
    return padded.reshape(len(rows), -1, BLOCK)

"""Tensor parallelism: which part of a model a rank holds, and the collectives that combine results.

Attention heads, hidden units of each MLP and experts are divided among ranks (Megatron-LM, arXiv
1909.08053, section 3), so a layer needs two sums; the head's vocabulary rows are divided too and its
logits gathered.
All ranks must sample from the same bits. A gather copies bits. An all-reduce computes each element once, on
one rank and in one order, and then copies it (gloo's ring; NCCL's rings and trees).
`TensorParallelGroup.compare` checks this from time to time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from idlm.errors import UserError
from idlm.infer.models.base import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """This rank among `size` ranks. `group` connects devices and `control` hosts (None: default group)."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    def local(self, spec: ModelSpec) -> ModelSpec:
        """The spec of one rank's layers; `moe` stays that of the whole model, whose router every rank has.

        Raises UserError IDLM-0423 if `size` does not divide heads, hidden units or experts."""
        moe = spec.moe
        indivisible = [
            f"{name}={value}"
            for name, value in (
                ("num_heads", spec.num_heads),
                ("num_kv_heads", spec.num_kv_heads),
                ("ffn_width", spec.ffn_width),
                ("num_experts", 0 if moe is None else moe.num_experts),
                ("shared_ffn_width", 0 if moe is None else moe.shared_ffn_width),
            )
            if value % self.size
        ]
        if indivisible:
            raise UserError(
                "IDLM-0423",
                f"tensor_parallel={self.size} does not divide {', '.join(indivisible)} of the model",
                fix="choose a divisor of them all",
            )
        return replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=spec.num_kv_heads // self.size,
            ffn_width=spec.ffn_width // self.size,
        )

    def device(self, device: torch.device) -> torch.device:
        """The device of this rank: GPUs are numbered like ranks."""
        if self.size == 1 or device.type != "cuda":
            return device
        return torch.device("cuda", self.rank)

    def part(self, size: int) -> slice:
        """This rank's part of `size` items; the last ranks may have fewer."""
        each = -(-size // self.size)
        return slice(min(self.rank * each, size), min((self.rank + 1) * each, size))

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over ranks, with the same bits on each; in place if `partial` is contiguous."""
        if self.size > 1:
            partial = partial.contiguous()
            dist.all_reduce(partial, group=self.group)
        return partial

    def gather(self, part_XV: Tensor, num_columns: int) -> Tensor:
        """The columns of all ranks [X, num_columns], where each holds those of `part(num_columns)`."""
        if self.size == 1:
            return part_XV
        each = -(-num_columns // self.size)
        padded_XV = F.pad(part_XV, (0, each - part_XV.shape[1])).contiguous()
        parts = [torch.empty_like(padded_XV) for _ in range(self.size)]
        dist.all_gather(parts, padded_XV, group=self.group)
        return torch.cat(parts, dim=1)[:, :num_columns]

    def least(self, number: int) -> int:
        """The minimum of `number` over the hosts of all ranks."""
        if self.size == 1:
            return number
        least = torch.tensor(number)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.control)
        return int(least)


ALONE = Shards()

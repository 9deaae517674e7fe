"""Gated LoRA, said once for training and inference: the rule, the files of an adapter, the identity of its
base.

h_j = W x_j + 1[j is MASK] * (alpha / r) * B A x_j in every adapted projection; rows that hold text are
computed by the base alone, so their logits are the base's bit for bit (paper arXiv 2604.11035, section 3.2
and appendix G). On disk an adapter is a stock PEFT LoRA plus `idlm_config.json`, which says that it is
gated and names its base.

Shape letters: R rows, M MASK rows, D input width, E output width, r rank.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional

from idlm.checkpoint import read_json
from idlm.contracts import is_number
from idlm.errors import UserError
from idlm.semantics import PROJECTIONS

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MASK_ROW = "idlm.mask_embedding"
"""Input embedding of MASK rows [D], beside the LoRA tensors of an adapter whose base has no usable row for
it. PEFT has no place for a row that the base's embedding lacks, and leaves a tensor of this name alone.
"""
MUST_BE_OFF = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
)
SAMPLE_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Shape of an adapter. `targets` are the last names of the adapted modules, in every layer alike.

    `base_path` is where the base was when the adapter was trained.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = PROJECTIONS
    base_path: str | None = None

    @property
    def scaling(self) -> float:
        """Factor of the low-rank product, alpha / r."""
        return self.alpha / self.rank

    def save(self, directory: Path) -> None:
        """Write `adapter_config.json`, with those fields only that every version of PEFT knows."""
        content = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_path,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (Path(directory) / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> AdapterSpec:
        """Read `adapter_config.json`; UserError IDLM-0610 names everything that is not a plain LoRA."""
        path = Path(directory) / CONFIG_FILE
        content = read_json(path)
        rank, alpha, targets = (content.get(name) for name in ("r", "lora_alpha", "target_modules"))
        problems = [f"{name}={content[name]!r}" for name in MUST_BE_OFF if content.get(name)]
        if content.get("peft_type") != "LORA":
            problems.append(f"peft_type={content.get('peft_type')!r}")
        if content.get("bias", "none") != "none":
            problems.append(f"bias={content['bias']!r}")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            problems.append(f"r={rank!r}")
        if not is_number(alpha):
            problems.append(f"lora_alpha={alpha!r}")
        if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
            problems.append(f"target_modules={targets!r}")
        if problems:
            raise UserError(
                "IDLM-0610",
                f"{path} does not describe a plain LoRA: {', '.join(problems)}",
                fix="use an adapter that idlm-train wrote: peft_type LORA, r, lora_alpha, target_modules as "
                "a list, and no variant of LoRA switched on",
            )
        base_path = content.get("base_model_name_or_path")
        return cls(
            rank=content["r"],
            alpha=content["lora_alpha"],
            targets=tuple(content["target_modules"]),
            base_path=str(base_path) if base_path else None,
        )


def tensor_name(module: str, matrix: str) -> str:
    """PEFT's name of matrix "A" [r, D] or "B" [E, r] of the projection at `module` in the base model."""
    return f"base_model.model.{module}.lora_{matrix}.weight"


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter and no whole model."""
    return (directory / CONFIG_FILE).is_file() and not (directory / "config.json").is_file()


def low_rank(x_MD: Tensor, a_rD: Tensor, b_Er: Tensor, scaling: float) -> Tensor:
    """What MASK rows gain, [M, E]: scaling * B A x."""
    return functional.linear(functional.linear(x_MD, a_rD), b_Er) * scaling


def base_identity(directory: Path) -> str:
    """Digest of the weights in `directory`, the same however they are split into files.

    Over every tensor's name, dtype, shape and three samples of 512 bytes: milliseconds for any size, and a
    fine-tuned copy differs although its headers do not. Raises UserError IDLM-0308 without safetensors files.
    """
    digest = hashlib.sha256()
    for name, (path, start, entry) in sorted(_tensors(Path(directory)).items()):
        first, last = entry["data_offsets"]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        with path.open("rb") as file:
            for place in (first, (first + last - SAMPLE_BYTES) // 2, last - SAMPLE_BYTES):
                file.seek(start + max(first, place))
                digest.update(file.read(min(SAMPLE_BYTES, last - first)))
    return digest.hexdigest()


def _tensors(directory: Path) -> dict[str, tuple[Path, int, dict[str, Any]]]:
    """File, start of the data in it and header entry of every tensor."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        files = [single]
    elif index.is_file():
        files = [directory / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    else:
        raise UserError(
            "IDLM-0308",
            f"{directory} has no model.safetensors, so the base of an adapter cannot be told by its weights",
            fix="give a base checkpoint whose weights are stored as safetensors",
        )
    found: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > os.fstat(file.fileno()).st_size:
                    raise ValueError("its header is longer than the file")
                header: dict[str, Any] = json.loads(file.read(length))
        except (OSError, ValueError) as error:
            raise UserError(
                "IDLM-0308",
                f"{path} cannot be read as safetensors: {error}",
                fix="restore the file from its source",
            ) from error
        found |= {name: (path, 8 + length, entry) for name, entry in header.items() if name != "__metadata__"}
    return found

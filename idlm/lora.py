"""Gated LoRA for training and inference: the rule, the files of an adapter, and the identity of its base.

h_j = W x_j + 1[j is MASK] * (alpha / r) * B A x_j in every adapted projection. The base alone computes rows
of text, so their logits are the base's bit for bit (arXiv 2604.11035, section 3.2 and appendix G). On disk an
adapter is a stock PEFT LoRA plus `idlm_config.json`, which marks it as gated and names its base. The kernel
is `kernels/gated_lora`.

Shape letters: M MASK rows, D input width, E output width, r rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idlm.checkpoint import ADAPTER_CONFIG, read_json
from idlm.config.schema import is_integer, is_number
from idlm.errors import UserError
from idlm.files.tensors import stored_tensors
from idlm.semantics import PROJECTIONS

WEIGHTS_FILE = "adapter_model.safetensors"
MASK_ROW = "idlm.mask_embedding"
"""Name of the input embedding [D] of MASK rows, stored with the LoRA tensors if the base has no usable row
for it. PEFT cannot add a row to the base's embedding, and ignores a tensor of this name."""
MUST_BE_OFF = (
    "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern",
    "modules_to_save", "layers_to_transform", "trainable_token_indices", "target_parameters",
    "layer_replication", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
"""Variants of LoRA in PEFT's config that neither training nor the engine computes, as those that a key of
`use_` switches on."""
INITS_THAT_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""First letters of PEFT's `init_lora_weights` that also change the weights which the LoRA is added to."""
SAMPLE_BYTES = 512
MAX_RANK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Shape of an adapter. `targets`: last parts of the names of the adapted modules. `base_path`: the base
    during training."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = PROJECTIONS
    base_path: str | None = None

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def save(self, directory: Path) -> None:
        """Write `adapter_config.json` with only the fields that every version of PEFT reads."""
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
        (Path(directory) / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> AdapterSpec:
        """Read `adapter_config.json`; UserErrors are those of `read`."""
        path = Path(directory) / ADAPTER_CONFIG
        return cls.read(read_json(path), origin=path)

    @classmethod
    def read(cls, content: Mapping[str, Any], *, origin: Path, targets: Sequence[str] = ()) -> AdapterSpec:
        """Read the content of `adapter_config.json`; UserError IDLM-0610 names every field that is not of a
        plain LoRA. `targets` replace `target_modules` that are a pattern or paths."""
        rank, alpha, names = (content.get(name) for name in ("r", "lora_alpha", "target_modules"))
        has_paths = isinstance(names, list) and any("." in str(name) for name in names)
        if targets and (isinstance(names, str) or has_paths):
            names = list(targets)
        # Not 0, which is a layer.
        problems = [
            f"{name}={value!r}"
            for name, value in content.items()
            if (name in MUST_BE_OFF or (name.startswith("use_") and name != "use_rslora"))
            and not (value in (None, [], {}) or value is False)
        ]
        if str(content.get("init_lora_weights")).lower().startswith(INITS_THAT_CHANGE_THE_BASE):
            problems.append(f"init_lora_weights={content['init_lora_weights']!r}")
        if content.get("peft_type") != "LORA":
            problems.append(f"peft_type={content.get('peft_type')!r}")
        if content.get("bias", "none") != "none":
            problems.append(f"bias={content['bias']!r}")
        if not is_integer(rank, 1, MAX_RANK):
            problems.append(f"r={rank!r}")
        if not is_number(alpha):
            problems.append(f"lora_alpha={alpha!r}")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            problems.append(f"target_modules={names!r}")
        if problems:
            raise UserError(
                "IDLM-0610",
                f"{origin} does not describe a plain LoRA: {', '.join(problems)}",
                fix=f"use a plain LoRA: peft_type LORA, r up to {MAX_RANK}, lora_alpha, target_modules as a "
                "list, bias none, and no variant switched on. peft's save_pretrained with "
                "path_initial_model_for_weight_conversion makes one of PiSSA, CorDA and OLoRA, idlm-import "
                "one with rank_pattern, alpha_pattern or layers_to_transform. Other variants have to be "
                "trained again without them; only an adapter that is not gated can be merged into its base "
                "in their place, with peft's merge_and_unload",
            )
        base_path = content.get("base_model_name_or_path")
        return cls(
            rank=content["r"],
            # Rank-stabilised LoRA divides alpha by the root of the rank.
            alpha=content["lora_alpha"] * (content["r"] ** 0.5 if content.get("use_rslora") else 1),
            targets=tuple(names or ()),
            base_path=str(base_path) if base_path else None,
        )


def tensor_name(module: str, matrix: str) -> str:
    """Return PEFT's name of matrix "A" [r, D] or "B" [E, r] of the projection at `module` of the base."""
    return f"base_model.model.{module}.lora_{matrix}.weight"


def base_identity(directory: Path) -> str:
    """Return a sha256 (hex) of the weights in `directory`, however they are split into files: of the name,
    dtype and shape of every tensor and three samples of 512 bytes, which a fine-tuned copy does not share.
    UserError as in `stored_tensors`."""
    digest = hashlib.sha256()
    for name, one in sorted(stored_tensors(Path(directory)).items()):
        digest.update(json.dumps([name, one.dtype, one.shape]).encode())
        with one.path.open("rb") as file:
            for offset in (0, (one.size - SAMPLE_BYTES) // 2, one.size - SAMPLE_BYTES):
                file.seek(one.start + max(0, offset))
                digest.update(file.read(min(SAMPLE_BYTES, one.size)))
    return digest.hexdigest()

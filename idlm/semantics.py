"""What a checkpoint MEANS: causality, shift, block, mask id, stride and stop ids, in `idlm_config.json`.

The weights do not show it: an I-DLM and an SDAR checkpoint share architecture strings and tensor names. The
trainer of a model therefore writes this file next to `config.json`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from idlm.checkpoint import read_json
from idlm.config.schema import is_integer
from idlm.errors import UserError

FILE_NAME = "idlm_config.json"
CAUSALITIES = ("causal", "block", "full")
MASK_REGIONS = ("response", "all")
LISTS = ("stop_token_ids", "edit_token_ids", "acceptance", "noise_range")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Last parts of the names of the linear layers that an adapter can change."""
MAX_NOISE = 1 << 31
MAX_STRIDE = 64
"""Largest stride of training and decoding: `branch` feeds as many rows as its square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Semantics:
    """How the rows of a forward pass see each other and which token each predicts.

    `causality`: rows see earlier positions ("causal"), also those of their own block ("block"), or all
    ("full"). `logit_shift`: a row predicts the next token, not its own. `stride`: the largest number of
    tokens per forward pass that the checkpoint was trained for, with `stride - 1` masks in a block (1: a
    plain autoregressive model). `mask_region`: the part of a training sample that was masked. `gated`: the
    checkpoint is a LoRA that applies to MASK rows only, for the base whose weights have the digest
    `base_identity` (`idlm.lora.base_identity`). `noise_range`: MASK rows have no id of their own, but one
    drawn anew for every row of every pass, uniform in [low, high) (token-causal checkpoints).
    `edit_token_ids`: two tokens that are no text: a row predicts the first to delete its position, the second
    to split it (LLaDA2.2; blocks without a shift). `acceptance`: how often the draft at each position is
    accepted once those before it were, which strides are first chosen by. `selector`: the kind of the
    selector of drafts that is stored with the checkpoint. The defaults describe a plain autoregressive
    checkpoint. Values that do not fit raise UserError IDLM-0304."""

    causality: str = "causal"
    logit_shift: bool = True
    block_size: int | None = None
    mask_token_id: int | None = None
    stride: int = 1
    mask_region: str = "response"
    gated: bool = False
    base_identity: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    edit_token_ids: tuple[int, ...] = ()
    acceptance: tuple[float, ...] = ()
    noise_range: tuple[int, ...] = ()
    selector: str | None = None

    @property
    def draft_input(self) -> str | None:
        """What MASK rows are fed: "mask", "uniform", or None if that is unknown."""
        if self.noise_range:
            return "uniform"
        return None if self.mask_token_id is None else "mask"

    def __post_init__(self) -> None:
        mask, stops, edits = self.mask_token_id, self.stop_token_ids, self.edit_token_ids
        noise = self.noise_range
        checks = {
            f"causality={self.causality!r} is not one of {CAUSALITIES}": self.causality in CAUSALITIES,
            f"mask_region={self.mask_region!r} is not one of {MASK_REGIONS}": self.mask_region
            in MASK_REGIONS,
            f"logit_shift={self.logit_shift!r} is not true or false": isinstance(self.logit_shift, bool),
            f"gated={self.gated!r} is not true or false": isinstance(self.gated, bool),
            f"stride={self.stride!r} is not an integer in [1, {MAX_STRIDE}]": is_integer(
                self.stride, 1, MAX_STRIDE
            ),
            f"stride={self.stride} needs a mask_token_id or a noise_range": self.draft_input is not None
            or not is_integer(self.stride, 2),
            f"noise_range={noise!r} is not [low, high] with 0 <= low < high <= {MAX_NOISE}": not noise
            or (
                len(noise) == 2 and is_integer(noise[0], 0) and is_integer(noise[1], noise[0] + 1, MAX_NOISE)
            ),
            f"noise_range and mask_token_id={mask} exclude each other": not noise or mask is None,
            f"causality={self.causality!r} needs a mask_token_id, not a noise_range": not noise
            or self.causality == "causal",
            f"mask_token_id={mask!r} is not a token id": mask is None or is_integer(mask, 0),
            f"gated=true needs the base_identity of the base, not {self.base_identity!r}": not self.gated
            or isinstance(self.base_identity, str),
            f"block_size={self.block_size!r} is not an integer above 0": self.block_size is None
            or is_integer(self.block_size, 1),
            "causality='block' needs a block_size": self.causality != "block" or self.block_size is not None,
            f"mask_token_id={mask} is one of stop_token_ids: it is another model's": mask not in stops,
            f"stop_token_ids={stops!r} are not token ids": all(is_integer(token, 0) for token in stops),
            f"edit_token_ids={edits!r} are not two token ids": len(edits) in (0, 2)
            and all(is_integer(token, 0) for token in edits),
            "edit_token_ids need causality='block' without logit_shift": not edits
            or (self.causality == "block" and not self.logit_shift),
            f"selector={self.selector!r} is not the name of a kind": self.selector is None
            or isinstance(self.selector, str),
            f"acceptance={self.acceptance!r} are not numbers between 0 and 1": all(
                isinstance(chance, int | float) and 0 <= chance <= 1 for chance in self.acceptance
            ),
        }
        problems = [text for text, holds in checks.items() if not holds]
        if problems:
            raise UserError(
                "IDLM-0304", "; ".join(problems), fix=f"correct {FILE_NAME} or the arguments given"
            )

    def save(self, directory: Path) -> None:
        payload = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }
        # Left out where they are the default, so that older versions read the others.
        for name in ("edit_token_ids", "acceptance", "noise_range", "selector"):
            if not payload[name]:
                del payload[name]
        (Path(directory) / FILE_NAME).write_text(json.dumps(payload, indent=2) + "\n")

    @classmethod
    def load(cls, directory: Path) -> Semantics:
        """Read `idlm_config.json`; without it, return the defaults of a plain AR checkpoint. UserError
        IDLM-0303: not JSON, IDLM-0305: unknown keys, IDLM-0304: bad values."""
        path = Path(directory) / FILE_NAME
        if not path.exists():
            return cls()
        payload = read_json(path)
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(payload.keys() - known):
            raise UserError(
                "IDLM-0305",
                f"{path} has unknown keys: {unknown}; known keys are {sorted(known)}",
                fix="the checkpoint may come from a newer idlm: update, or remove the unknown keys",
            )
        for name in LISTS:
            values = payload.get(name, [])
            if not isinstance(values, list):
                raise UserError(
                    "IDLM-0304", f"{path}: {name}={values!r} is not a list", fix="give a list of numbers"
                )
            payload[name] = tuple(values)
        return cls(**payload)

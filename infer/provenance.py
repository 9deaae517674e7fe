"""What answers are made with: said in every record, so that a run which goes on with them can be held to it.

By the keys of the command line, as given, without what is left at its default. Not the resolved settings:
these are known before a model is loaded, and with the digest of the model they stand for the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from idlm.checkpoint import MANIFEST
from idlm.contracts import SamplingParams
from idlm.infer.config import EngineConfig
from idlm.infer.models.loader import checkpoint_directory
from idlm.infer.models.weights import INDEX_FILE, locate
from idlm.lora import WEIGHTS_FILE, base_identity, is_adapter
from idlm.paths import telling_of_path

NO_MATTER = (
    *("device", "tensor_parallel", "attention", "graphs", "run_ahead", "deterministic"),
    *("memory", "max_num_seqs", "max_prompt_rows", "page_size", "num_pages", "prefix_cache"),
)
"""Where and how fast the model runs: an interrupted run may go on with others."""
SAID_OTHERWISE = ("base", "accelerator")
"""The first by the adapter's own files, which name its base by its weights."""
PATH, DIGEST = "model", "model_digest"
DIGEST_BYTES = 16

MadeWith = Mapping[str, Any]
"""Plain data by key."""


def made_with(
    config: EngineConfig,
    model: str,
    *,
    decoder: str | None,
    options: Mapping[str, Any],
    accelerators: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """What all answers of a run have in common; `options` are those of the decoder. UserErrors of a
    checkpoint that is none.
    """
    defaults = EngineConfig()
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    changed = {
        name: getattr(config, name)
        for name in names
        if name not in (*NO_MATTER, *SAID_OTHERWISE) and getattr(config, name) != getattr(defaults, name)
    }
    return _plain(
        {
            PATH: str(Path(model).resolve()),
            DIGEST: model_digest(model),
            **({"decoder": decoder} if decoder else {}),
            **{f"decoder.{name}": value for name, value in options.items()},
            **({"accelerator": accelerators} if accelerators else {}),
            **changed,
        }
    )


def of_request(common: MadeWith, params: SamplingParams) -> dict[str, Any]:
    """`common`, and the sampling settings of one request."""
    defaults = SamplingParams()
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    changed = {
        f"sampling.{name}": getattr(params, name)
        for name in names
        if getattr(params, name) != getattr(defaults, name)
    }
    return {**common, **_plain(changed)}


def difference(there: MadeWith, here: MadeWith) -> str | None:
    """The first difference in words, or None. A checkpoint may have been moved: its digest counts."""
    told, asked = _texts(there), _texts(here)
    for key in [*asked, *told]:
        if told.get(key) != asked.get(key):
            return f"made with {_said(there, key)}, and this run has {_said(here, key)}"
    return None


def fingerprint(made: MadeWith) -> bytes:
    """Digest of what `difference` compares: the same where there is none."""
    return blake2b(repr(sorted(_texts(made).items())).encode(), digest_size=DIGEST_BYTES).digest()


def _texts(made: MadeWith) -> dict[str, str]:
    """What is compared, as JSON by key: 1.0 is 1, and nothing is null."""
    plain: dict[str, Any] = json.loads(json.dumps(made), parse_float=_number)
    return {
        key: json.dumps(value, sort_keys=True)
        for key, value in plain.items()
        if key != PATH and value is not None
    }


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _said(made: MadeWith, key: str) -> str:
    if key == DIGEST:
        return f"{PATH}={made.get(PATH)} ({DIGEST} {made.get(DIGEST)})"
    return f"{key}={made[key]!r}" if key in made else f"the default of {key}"


def model_digest(model: str) -> str:
    """Digest of a checkpoint or adapter: of what is said in its files, and of its weights by samples."""
    with telling_of_path("IDLM-0600", model, fix="give another model="):
        return _digest(checkpoint_directory(model))


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.json"), *directory.glob("*.jinja")]):
        # What these say of the other files depends on how the weights are divided.
        if path.name not in (MANIFEST, INDEX_FILE):
            digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()} ".encode())
    if not is_adapter(directory):
        locate(directory)
        digest.update(base_identity(directory).encode())
    elif (directory / WEIGHTS_FILE).is_file():
        with (directory / WEIGHTS_FILE).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[: 2 * DIGEST_BYTES]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives them back. What YAML has beside (dates) no setting takes: the engine will say so."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain

"""What answers are made with: said in every record, so that a run which goes on with them can be held to it.

By the keys of the command line, as given, without what is at its default; the decoder by its name. Not the
resolved settings: these are known before a model is loaded, and with the digest of the model they stand for
the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from idlm.checkpoint import read_json
from idlm.contracts import SamplingParams
from idlm.files.paths import translate_path_errors
from idlm.infer.accelerators.base import ACCELERATORS
from idlm.infer.config import EngineConfig
from idlm.infer.decoders.base import DECODERS, fitting_decoders
from idlm.infer.models.base import FAMILIES
from idlm.infer.models.loader import checkpoint_directory
from idlm.infer.models.weights import locate
from idlm.lora import CONFIG_FILE, WEIGHTS_FILE, AdapterSpec, base_identity, is_adapter
from idlm.semantics import FILE_NAME as SEMANTICS_FILE
from idlm.semantics import Semantics
from idlm.text.tokenizer import TOKENIZER_FILES

SPEED_ONLY_KEYS = (
    *("device", "tensor_parallel", "attention", "graphs", "num_inflight_steps", "deterministic"),
    *("memory", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages", "prefix_cache"),
)
"""Where and how fast the model runs: an interrupted run may go on with others."""
EXCLUDED_KEYS = ("base", "accelerator")
"""The first by the adapter's own files, which name its base by its weights."""
PATH, DIGEST = "model", "model_digest"
DIGEST_BYTES = 16
MEANING_FILES = (
    *("config.json", "generation_config.json", SEMANTICS_FILE, CONFIG_FILE),
    *TOKENIZER_FILES,
)
MORE_TEMPLATES = "additional_chat_templates/*.jinja"

MadeWith = Mapping[str, Any]
"""Plain data by key."""


def run_config(
    config: EngineConfig,
    model: str,
    *,
    decoder: str | None,
    options: Mapping[str, Any],
    accelerators: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """What all answers of a run have in common; `options` are those of the decoder, None for the one that the
    checkpoint was made for. UserErrors of a checkpoint that is none and of plug-ins that are unknown.
    """
    with translate_path_errors("IDLM-0600", model, fix="give another model="):
        decoder = decoder or _decoder_of(checkpoint_directory(model))
    if decoder is not None:
        options = _changed(DECODERS.get(decoder).Config, options)
    accelerators = {
        name: _changed(ACCELERATORS.get(name).Config, given) for name, given in accelerators.items()
    }
    defaults = EngineConfig()
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    changed = {
        name: getattr(config, name)
        for name in names
        if name not in (*SPEED_ONLY_KEYS, *EXCLUDED_KEYS) and getattr(config, name) != getattr(defaults, name)
    }
    return _plain(
        {
            PATH: str(Path(model).resolve()),
            DIGEST: model_digest(model, base=config.base),
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


def model_digest(model: str, *, base: str | None = None) -> str:
    """Digest of a checkpoint, or of an adapter and what is said of its base, which is at `base` or where its
    own files say: of the files that the engine reads, and of weights by samples. Other files may come and go.
    """
    with translate_path_errors("IDLM-0600", model, fix="give another model="):
        return _digest(checkpoint_directory(model), base)


def _digest(directory: Path, base: str | None) -> str:
    digest = hashlib.sha256(_said_in(directory))
    if not is_adapter(directory):
        locate(directory)
        digest.update(base_identity(directory).encode())
        return digest.hexdigest()[: 2 * DIGEST_BYTES]
    if (directory / WEIGHTS_FILE).is_file():
        with (directory / WEIGHTS_FILE).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    path = base or AdapterSpec.load(directory).base_path
    if path is not None and Path(path).is_dir():
        # Not its weights: the adapter's own files name them, and the engine refuses others.
        digest.update(b"base " + _said_in(Path(path)))
    return digest.hexdigest()[: 2 * DIGEST_BYTES]


def _said_in(directory: Path) -> bytes:
    """Names and digests of those files beside the weights that say what a model, its tokenizer and its
    answers are.
    """
    paths = [directory / name for name in MEANING_FILES] + sorted(directory.glob(MORE_TEMPLATES))
    return b"".join(
        f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()} ".encode()
        for path in paths
        if path.is_file()
    )


def _decoder_of(directory: Path) -> str | None:
    """The default one, by the files that are small; None where they do not tell, which the engine refuses."""
    if (directory / SEMANTICS_FILE).is_file():
        return fitting_decoders(Semantics.load(directory))[0]
    if is_adapter(directory):
        return None
    config = read_json(directory / "config.json")
    match config.get("architectures"):
        case [str(name)] if name in FAMILIES.names() and FAMILIES.get(name).unknown_semantics is None:
            return fitting_decoders(FAMILIES.get(name).semantics(config))[0]
    return None


def _changed(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without those that are spelled out at their default in the Config `kind`."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    return {name: value for name, value in options.items() if name not in defaults or value != defaults[name]}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives them back. What YAML has beside (dates) no setting takes: the engine will say so."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain

"""`run_config`: the settings that decide an answer, as plain data by key of the command line, without
defaults.

Every record of an output file holds it, so that a resumed run is compared with the answers it continues
before a model is loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from idlm.checkpoint import ADAPTER_CONFIG, is_adapter
from idlm.config.schema import plain
from idlm.contracts import SamplingParams
from idlm.files.paths import translate_path_errors
from idlm.infer.cli.config import EngineArguments
from idlm.infer.models.loader import checkpoint_directory
from idlm.infer.models.weights import locate
from idlm.infer.settings import EngineSettings
from idlm.lora import WEIGHTS_FILE, AdapterSpec, base_identity
from idlm.semantics import FILE_NAME as SEMANTICS_FILE
from idlm.text.tokenizer import TOKENIZER_FILES

SPEED_ONLY_KEYS = (
    *("device", "tensor_parallel", "attention", "graphs", "warmup", "num_inflight_steps", "deterministic"),
    *("memory", "memory_arena", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages"),
    "prefix_cache",
)
"""Where and how fast the model runs: a resumed run may change these."""
EXCLUDED_KEYS = ("base", "accelerators")
"""Keys recorded in another form: an adapter's own files name its base by its weights, and accelerators are
recorded with their options."""
PATH, DIGEST = "model", "model_digest"
MODEL_FILES = (
    *("config.json", "generation_config.json", SEMANTICS_FILE, ADAPTER_CONFIG, WEIGHTS_FILE),
    *TOKENIZER_FILES,
)
MORE_TEMPLATES = "additional_chat_templates/*.jinja"

RunConfig = Mapping[str, Any]


def run_config(config: EngineSettings, arguments: EngineArguments) -> dict[str, Any]:
    """What all answers of a run have in common. UserErrors of a path that is not a checkpoint."""
    changed = _changed(config, EngineSettings(), skip=(*SPEED_ONLY_KEYS, *EXCLUDED_KEYS))
    decoder, accelerators = arguments.decoder, arguments.settings["accelerators"]
    values = {
        PATH: str(Path(arguments.model).resolve()),
        DIGEST: model_digest(arguments.model, base=config.base),
        **({"decoder": decoder} if decoder else {}),
        **{f"decoder.{name}": value for name, value in arguments.options.items()},
        **({"accelerators": accelerators} if accelerators else {}),
        **changed,
    }
    # YAML has types that JSON lacks (dates). No setting takes them, which the engine reports.
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def of_request(common: RunConfig, params: SamplingParams) -> dict[str, Any]:
    """`common` and the sampling settings of one request, as JSON returns them."""
    changed = _changed(params, SamplingParams(), prefix="sampling.")
    return {**common, **plain(changed)}


def difference(there: RunConfig, here: RunConfig) -> str | None:
    """The first difference in words, or None. A checkpoint may have moved: only its digest is compared."""
    for key in [*here, *there]:
        if key != PATH and there.get(key) != here.get(key):
            return f"made with {_described(there, key)}, and this run has {_described(here, key)}"
    return None


def model_digest(model: str, *, base: str | None = None) -> str:
    """Digest of a checkpoint's configuration, tokenizer and weights (`idlm.lora.base_identity`). For an
    adapter: of its own files and the small ones of its base, which is at `base` or at the path that they
    name."""
    with translate_path_errors("IDLM-0600", model, fix="give another model="):
        directory = checkpoint_directory(model)
        folders, digest = [directory], hashlib.sha256()
        if not is_adapter(directory):
            locate(directory)
            digest.update(base_identity(directory).encode())
        else:
            # The adapter's own files identify the weights of its base, and the engine refuses others.
            base = base or AdapterSpec.load(directory).base_path
            folders += [Path(base)] if base is not None and Path(base).is_dir() else []
        for folder in folders:
            paths = [folder / name for name in MODEL_FILES] + sorted(folder.glob(MORE_TEMPLATES))
            for path in filter(Path.is_file, paths):
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{path.name} {content} ".encode())
    return digest.hexdigest()[:32]


def _changed(values: Any, defaults: Any, *, prefix: str = "", skip: tuple[str, ...] = ()) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(defaults) if field.name not in skip]
    return {
        f"{prefix}{name}": getattr(values, name)
        for name in names
        if getattr(values, name) != getattr(defaults, name)
    }


def _described(made: RunConfig, key: str) -> str:
    if key == DIGEST:
        return f"{PATH}={made.get(PATH)} ({DIGEST} {made.get(DIGEST)})"
    return f"{key}={made[key]!r}" if key in made else f"the default of {key}"

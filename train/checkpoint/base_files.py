"""What an export takes over from the folder of its base besides weights: config.json, the files of the
tokenizer, and the licence. They are read when a run starts: an export has what it was trained with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from idlm.checkpoint import LICENSE, MODEL_CARD, read_json
from idlm.text.templates import TEMPLATE_FOLDER
from idlm.text.tokenizer import TOKENIZER_FILES

FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)
LICENSE_KEYS = ("license", "license_name", "license_link")
KNOWN_LICENSES = {
    "apache-2.0": re.compile(r"\s*Apache License\s+Version 2\.0", re.IGNORECASE),
    "mit": re.compile(r"\s*(The )?MIT License", re.IGNORECASE),
}
"""Names of licences on the hub, and how their texts begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFiles:
    """`config`: config.json, {} for new weights. `tokenizer`: content by name. `name`: that of the folder, or
    of the repository in a cache of the hub; None for new weights. `license`: keys of a model card about it.
    `license_text`: the file of that name."""

    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)
    name: str | None = None
    license: Mapping[str, str] = field(default_factory=dict)
    license_text: bytes | None = None


def read_base_files(base: Path | None, tokenizer: Path) -> BaseFiles:
    """Read the folder `base`, None for new weights, and that of the tokenizer."""
    if base is None:
        return BaseFiles(tokenizer=read_tokenizer_files(tokenizer))
    paths = [base / f"{LICENSE}{suffix}" for suffix in ("", ".txt", ".md")]
    text = next((path.read_bytes() for path in paths if path.is_file()), None)
    return BaseFiles(
        config=read_json(base / "config.json"),
        tokenizer=read_tokenizer_files(tokenizer),
        name=_name(base),
        license=_license_of_card(base / MODEL_CARD, text) or _license_of_text(text),
        license_text=text,
    )


def read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the content of every file of the tokenizer in `directory`, by its path in there."""
    paths = [directory / name for name in TOKENIZER_FILES] + sorted(
        directory.glob(f"{TEMPLATE_FOLDER}/*.jinja")
    )
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths if path.is_file()}


def _name(base: Path) -> str:
    """`organisation/name` in a cache of the hub (models--organisation--name/snapshots/commit)."""
    cached = [part for part in base.absolute().parts if part.startswith("models--")]
    return cached[-1].removeprefix("models--").replace("--", "/") if cached else base.resolve().name


def _license_of_card(path: Path, text: bytes | None) -> dict[str, str]:
    """The keys about the licence in a model card; a link to a file beside it becomes one to its copy."""
    found = FRONT_MATTER.match(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    try:
        values = yaml.safe_load(found[1]) if found else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    given = values if isinstance(values, dict) else {}
    found_keys = {key: given[key] for key in LICENSE_KEYS if isinstance(given.get(key), str)}
    if not found_keys.get("license_link", "https://").startswith(("https://", "http://")):
        found_keys |= {"license_link": LICENSE}
        if text is None:
            del found_keys["license_link"]
    return found_keys


def _license_of_text(text: bytes | None) -> dict[str, str]:
    """The name of a licence that everybody knows, otherwise the first line of its text; {} without a text."""
    content = "" if text is None else text.decode("utf-8", errors="replace")
    known = next((name for name, start in KNOWN_LICENSES.items() if start.match(content)), None)
    if known is not None or not content.strip():
        return {"license": known} if known is not None else {}
    first = re.sub(r"[^a-z0-9.]+", "-", content.strip().splitlines()[0].lower()).strip("-")
    return {"license": "other", "license_name": first, "license_link": LICENSE}

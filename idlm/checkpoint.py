"""Checks a published checkpoint directory by its sha256 manifest, reads its JSON files, and refuses keys of a
model's config.json that may change the forward pass and that no code here reads.

`idlm/publish.py` writes such directories. Layout while publishing: `.<name>.staging-XXXX/{lock, files/}`."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import stat
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from idlm.errors import UserError
from idlm.files.disk import MANIFEST

HASHING_THREADS = 8
FORMAT = "idlm-manifest-1"
ADAPTER_CONFIG = "adapter_config.json"
MODEL_CARD, LICENSE = "README.md", "LICENSE"
FOR_PEOPLE = (MODEL_CARD, LICENSE)
"""Files that people write and edit: a changed one does not damage a checkpoint, and is never replaced."""
MAX_WHOLE_FILE = 1 << 27
"""Bytes of the largest file of a checkpoint that is read whole; those of large tokenizers have a quarter."""
SUSPECT = re.compile(
    r"expert|moe|rout|topk|window|scal(e|ing)|multiplier|softcap|token_?(ids?|idx|index|offset)(_|$)"
)
"""Words in the names of keys that may change the forward pass; other unknown keys pass. Two published models
may share architecture strings and tensor names and differ only in such a key."""
READ = "read"
OF_THE_TOKENIZER = "the files of the tokenizer define the tokens of a text"
COMMON_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("rope_scaling", "rope_parameters", "eos_token_id", "mask_token_id"), READ),
    **dict.fromkeys(("use_sliding_window", "sliding_window", "max_window_layers"), READ),
    **dict.fromkeys((f"{name}_token_id" for name in ("bos", "pad", "unk", "sep", "cls")), OF_THE_TOKENIZER),
    **dict.fromkeys(("output_router_logits", "router_aux_loss_coef"), "only training reads it"),
}
"""Keys that any model's config may have: `READ`, or why the key is ignored."""
HARMLESS_KEYS = {key for key, reason in COMMON_KEYS.items() if reason != READ}
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def recover(target: Path) -> None:
    """Finish the swap of a publisher that died between its two renames, if there is one."""
    target = Path(target).resolve()
    if os.path.lexists(target):
        return
    for ready in sorted(target.parent.glob(f"{staging_pattern(target)}/ready")):
        # Another process may finish the same swap at the same time: either is right.
        with contextlib.suppress(FileNotFoundError):
            os.rename(ready, target)
            fsync(target.parent)
            return


def verify(
    directory: Path, *, required: bool = True, sealed: bool = False, sizes_only: Collection[str] = ()
) -> None:
    """Check size and sha256 of every file in the manifest of `directory`, after `recover`.

    Mismatches, missing files, links and names outside the directory raise UserError IDLM-0302, except for the
    texts `FOR_PEOPLE`. A missing manifest is an error unless `required` is False. With `sealed`, so are files
    that the manifest does not name. Of the files `sizes_only` no content is read."""
    directory = Path(directory)
    recover(directory)
    if not directory.is_dir():
        raise UserError("IDLM-0307", f"there is no checkpoint directory at {directory}", fix="check the path")
    if not os.path.lexists(directory / MANIFEST):
        if required:
            raise _mismatch(directory / MANIFEST, "the file is missing")
        return
    files = read_manifest(directory)
    for path in sorted(directory.rglob("*")) if sealed else ():
        is_known = path.relative_to(directory).as_posix() in {MANIFEST, *files}
        if not is_known and (path.is_symlink() or not path.is_dir()):
            raise _mismatch(path, "its manifest does not name this file")
    files = {name: entry for name, entry in files.items() if name not in FOR_PEOPLE}
    for name, entry in files.items():
        path = directory / name
        inside = [path, *(parent for parent in path.parents if directory in parent.parents)]
        if any(link.is_symlink() for link in inside):
            raise _mismatch(path, "it is reached through a symbolic link")
        if not path.is_file():
            raise _mismatch(path, "the file is missing")
        size = path.stat().st_size
        if size != entry["size"]:
            raise _mismatch(path, f"it has {size} bytes, in the manifest {entry['size']}")
    hashed = [name for name in files if name not in sizes_only]
    for name, digest in zip(hashed, sha256_of([directory / name for name in hashed]), strict=True):
        if digest != files[name]["sha256"]:
            raise _mismatch(directory / name, "its sha256 differs from the manifest")


def is_adapter(directory: Path) -> bool:
    """Return whether a directory holds an adapter and no whole model."""
    return (directory / ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file()


def warn_of_adapter(directory: Path) -> None:
    """Warn of an adapter next to a whole model, where PEFT may save one."""
    if (directory / ADAPTER_CONFIG).is_file():
        what = "the adapter next to the whole model is not applied, though transformers' AutoModel applies it"
        warnings.warn(f"{directory}: {what}; merge it, import it (idlm-import) or move it", stacklevel=2)


def check_file(path: str | Path) -> None:
    """Raise OSError for a file that cannot be read whole: there is none, it is a pipe, a device or a folder,
    or it has more than `MAX_WHOLE_FILE` bytes."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if found.st_size > MAX_WHOLE_FILE:
        maximum = f"at most {MAX_WHOLE_FILE} are read"
        raise OSError(errno.EINVAL, f"it has {found.st_size} bytes, {maximum}", str(path))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; otherwise UserError IDLM-0303 with file, line and reason."""
    path = Path(path)
    cause: Exception | None = None
    try:
        check_file(path)
        content = json.loads(path.read_bytes().decode("utf-8"))
        if isinstance(content, dict):
            return content
        problem = f"{path}, line 1: expected an object, got {type(content).__name__}"
    except OSError as error:
        problem = f"cannot read {path}: {error.strerror}"
        raise UserError("IDLM-0303", problem, fix="check the path") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        problem, cause = f"{path}, line {line}: not UTF-8 text", error
    except json.JSONDecodeError as error:
        problem, cause = f"{path}, line {error.lineno}: {error.msg}", error
    except (ValueError, RecursionError) as error:
        problem, cause = f"{path}: {error}", error
    raise UserError("IDLM-0303", problem, fix="restore the file from its source") from cause


def read_manifest(directory: Path) -> dict[str, dict[str, Any]]:
    """Return sha256 and size of every file by name; UserError IDLM-0302 for a damaged manifest."""
    path = directory / MANIFEST
    if path.is_symlink():
        raise _mismatch(path, "it is a symbolic link")
    manifest = read_json(path)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict):
        raise _mismatch(path, f"it is not a manifest of format {FORMAT!r}")
    for name, entry in files.items():
        pure = PurePosixPath(name)
        if not pure.parts or "\0" in name or pure.is_absolute() or ".." in pure.parts or str(pure) != name:
            raise _mismatch(path, f"the name {name!r} is not a plain path inside the checkpoint")
        if not isinstance(entry, dict) or entry.keys() != {"sha256", "size"}:
            raise _mismatch(path, f"its entry for {name!r} is malformed")
    if path.read_text(encoding="utf-8") != manifest_text(files):
        raise _mismatch(path, "it was altered after publication")
    return files


def foreign_files(target: Path, names: Iterable[str]) -> list[str]:
    """Return those of `names` that `target` has but not its manifest; `publish` refuses to replace them."""
    ours = own_files(target)
    return [name for name in names if os.path.lexists(target / name) and target / name not in ours]


def own_files(target: Path) -> set[Path]:
    """Return the paths of the manifest of `target` and of its files, without edited texts `FOR_PEOPLE`."""
    if not (target.is_dir() and (target / MANIFEST).exists()):
        return set()
    files = read_manifest(target)
    texts = [target / name for name in FOR_PEOPLE if name in files and (target / name).is_file()]
    digests = zip(texts, sha256_of(texts), strict=True)
    edited = {path for path, digest in digests if digest != files[path.name]["sha256"]}
    return {target / name for name in (MANIFEST, *files)} - edited


def _mismatch(path: Path, reason: str) -> UserError:
    return UserError(
        "IDLM-0302",
        f"{path} is not what was published: {reason}",
        fix="copy or download the checkpoint again; never edit it in place",
    )


def staging_pattern(target: Path) -> str:
    """Return the glob pattern of the staging directories of `target`, relative to its parent."""
    return f".{glob.escape(target.name)}.staging-*"


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a directory; their own rename is durable.
        if not (error.errno in (errno.EINVAL, errno.ENOTSUP) and stat.S_ISDIR(os.fstat(descriptor).st_mode)):
            raise
    finally:
        os.close(descriptor)


def manifest_text(files: dict[str, dict[str, Any]]) -> str:
    # The digest distinguishes a damaged manifest from a damaged file.
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"format": FORMAT, "files": files, "digest": digest}, indent=1) + "\n"


def sha256_of(paths: list[Path]) -> list[str]:
    """Return digests in order, reading in parallel: a core reads about 1 GB/s, a disk more."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=HASHING_THREADS) as pool:
        return list(pool.map(digest, paths))


def refuse_unknown_keys(
    config: Mapping[str, Any],
    known: Collection[str],
    *,
    foreign: Mapping[str, str] | None = None,
    source: str = "config.json",
) -> None:
    """Raise UserError IDLM-0618 for keys that are not `known` and may change the computation, in nested
    sections too; a key that is null, false or empty enables nothing. `foreign`: keys of published models that
    share the architecture strings but compute something else, and the names of the models."""
    unknown = dict(_suspects(config, {*known, *COMMON_KEYS}))
    if not unknown:
        return
    listed = ", ".join(f"{key}={value!r:.60}" for key, value in unknown.items())
    models = " or ".join(dict.fromkeys(name for key, name in (foreign or {}).items() if key in unknown))
    raise UserError(
        "IDLM-0618",
        f"{source} has keys that change what a model computes, which this version does not support: {listed}"
        + f"; this is {models}, which this version does not support" * bool(models),
        fix="use another checkpoint; take a key out of config.json only if the model computes the same "
        "without it",
    )


def _suspects(
    section: Mapping[str, Any], known: Collection[str], path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield path and value of unknown suspect keys, also of nested sections that no code here reads."""
    for key, value in section.items():
        if key in known or value is None or value is False or value in ("", [], {}):
            continue
        if SUSPECT.search(key.lower()) or SUSPECT.search(CAMEL.sub("_", key).lower()):
            yield path + key, value
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from _suspects(item, HARMLESS_KEYS, f"{path}{key}.")


def refuse_impossible_counts(
    counts: Mapping[str, Any], num_tensors: int, *, source: str = "config.json"
) -> None:
    """Raise UserError IDLM-0603 for more layers or experts than tensors, before any loop runs over them."""
    for key, value in counts.items():
        if isinstance(value, int) and value > num_tensors:
            raise UserError(
                "IDLM-0603",
                f"{source} has {key}={value}, and the weight files hold {num_tensors} tensors",
                fix="use the config.json that belongs to these weights, and download all weight files",
            )

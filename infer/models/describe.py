"""Lines of `describe=true`: how the loader reads a checkpoint. Reads no weights."""

from __future__ import annotations

import dataclasses
from math import prod

from idlm.infer.models.base import FAMILIES, ModelSpec, MoeSpec
from idlm.infer.models.loader import SEMANTICS_FILE, Outline


def description(outline: Outline) -> list[str]:
    """Family, semantics, shapes, dtype, and which tensors are ignored or reordered."""
    spec, meaning = outline.spec, outline.semantics
    family = FAMILIES.get(outline.architecture)
    directory = outline.directory if outline.adapter is None else outline.adapter.directory
    is_written = (directory / SEMANTICS_FILE).is_file()
    reordered = sorted(name for name, target in outline.targets.items() if target.order is not None)
    numbers = sum(prod(target.shape) for target in outline.targets.values())
    lines = [
        f"checkpoint  {outline.directory}, {len(set(outline.files.values()))} weight files",
        f"family      {outline.architecture} ({family.__module__.rpartition('.')[2]})",
        f"semantics   from {SEMANTICS_FILE if is_written else 'the family'}, mask_token_id as given or there",
        *(f"  {field.name}={getattr(meaning, field.name)!r}" for field in dataclasses.fields(meaning)),
        f"shape       dtype={str(outline.dtype).removeprefix('torch.')}, {_fields(spec)}",
        f"experts     {'none' if spec.moe is None else _fields(spec.moe)}",
        f"tensors     {len(outline.targets)} read, {numbers:,} numbers; none missing, none unused",
        f"ignored     {', '.join(outline.ignored) or 'nothing'}",
        f"reordered   {_rotation(spec, reordered)}",
    ]
    if outline.adapter is not None:
        lines.append(f"adapter     {directory}, gated, rank {outline.adapter.spec.rank}")
    return lines


def _fields(values: ModelSpec | MoeSpec) -> str:
    shown = [field.name for field in dataclasses.fields(values) if field.name not in ("rope_inv_freq", "moe")]
    return ", ".join(f"{name}={getattr(values, name)!r}" for name in shown)


def _rotation(spec: ModelSpec, names: list[str]) -> str:
    if not names:
        return "nothing"
    return (
        f"query and key dimensions in {len(names)} tensors, the first is {names[0]}: {spec.rotary_dim} of "
        f"{spec.head_dim} rotate"
    )

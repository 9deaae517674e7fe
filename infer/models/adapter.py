"""Loads gated LoRAs, PEFT directories with gated=true in their semantics, onto the base they were trained on.
`idlm.lora` defines the computation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from idlm.checkpoint import ADAPTER_CONFIG, verify
from idlm.errors import UserError, some_of
from idlm.files.tensors import Stored, headers
from idlm.infer.models import weights
from idlm.infer.models.base import TensorNames
from idlm.infer.models.dense import SUMMED, DenseLayer, DenseTrunk
from idlm.infer.models.low_rank import LowRank
from idlm.infer.models.weights import WeightTarget, row_orders, row_target, target_of
from idlm.kernels.gated_lora import MAX_ADAPTERS
from idlm.lora import MASK_ROW, WEIGHTS_FILE, AdapterSpec, base_identity, tensor_name
from idlm.semantics import FILE_NAME as SEMANTICS_FILE
from idlm.semantics import Semantics

OWN = ("stride", "mask_region", "acceptance", "selector")
"""In what adapters of one engine may differ; `build.read_checkpoint` checks strides and selectors."""
DIVERGED = "use an adapter of an earlier step, before its training diverged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    directory: Path
    base: Path
    spec: AdapterSpec
    semantics: Semantics
    files: dict[str, Stored]

    @property
    def has_mask_row(self) -> bool:
        """Whether the adapter has its own embedding of MASK, so that the base needs no row for it."""
        return MASK_ROW in self.files


def open_adapter(directory: Path, *, base: str | Path | None) -> Adapter:
    """Check an adapter without its weights. `base` overrides adapter_config.json. Raises UserError IDLM-0302,
    0607, 0610, and IDLM-0609 (not gated), 0611 (no base), 0612 (another base)."""
    verify(directory, required=False)
    spec = AdapterSpec.load(directory)
    meaning = Semantics.load(directory)
    if not meaning.gated:
        raise UserError(
            "IDLM-0609",
            f"{directory} is a LoRA that is not gated ({SEMANTICS_FILE} with gated=true is missing): it was "
            "trained on all rows, and on MASK rows alone it would compute something else",
            fix="merge it into its base with peft's merge_and_unload, or train a gated one with idlm-train "
            "adapter.rank=...; one of others that is gated is imported by idlm-import",
        )
    files = headers(directory / WEIGHTS_FILE)
    path = base_directory(directory, base or spec.base_path)
    if meaning.base_identity != base_identity(path):
        raise UserError(
            "IDLM-0612",
            f"{path} is not the base that {directory} was trained on: its weights differ",
            fix="give base=PATH with the weights of its training, or idlm-import the adapter for these",
        )
    return Adapter(directory=directory, base=path, spec=spec, semantics=meaning, files=files)


def base_directory(adapter: str | Path, *paths: str | Path | None) -> Path:
    """Return the first of `paths` that has a whole model; UserError IDLM-0611 where none has."""
    given = [str(path) for path in paths if path]
    found = next((path for path in map(Path, given) if (path / "config.json").is_file()), None)
    if found is None:
        where = f"not at {' or '.join(given)}" if given else "named nowhere"
        raise UserError(
            "IDLM-0611",
            f"{adapter} is an adapter, and its base model is {where}",
            fix="give base=PATH, the directory of the base model with config.json and weights",
        )
    return found


def open_further(
    folders: Mapping[str, Path], first: Adapter, *, ignored: tuple[str, ...] = ()
) -> tuple[Adapter, ...]:
    """Open the adapters, by name, that an engine of `first` has besides. `ignored`: what of their semantics
    is overridden. UserError IDLM-0626 for one that means something else or more than a pass can have, and
    those of `open_adapter`."""
    if len(folders) >= MAX_ADAPTERS:
        raise UserError(
            "IDLM-0626",
            f"adapters= names {len(folders)}, and with {first.directory} a pass has {MAX_ADAPTERS} at most",
            fix=f"name {MAX_ADAPTERS - 1} of them, and serve the others by another server",
        )
    found = []
    for name, folder in folders.items():
        adapter = open_adapter(folder, base=first.base)
        mine, others = (dataclasses.asdict(one.semantics) for one in (adapter, first))
        differing = [
            f"{key}={value!r} (not {others[key]!r})"
            for key, value in mine.items()
            if value != others[key] and key not in (*OWN, *ignored)
        ]
        if differing:
            raise UserError(
                "IDLM-0626",
                f"adapter {name!r}, {folder}, cannot share passes with {first.directory}: it has "
                f"{', '.join(differing)}",
                fix=f"serve it alone, with model={folder}, or train both alike",
            )
        found.append(adapter)
    return tuple(found)


def check_adapters(empty: DenseTrunk, adapters: Sequence[Adapter], names: TensorNames) -> None:
    """Compare adapters with a trunk on the meta device, where no rank takes memory. Raises UserError
    IDLM-0613 with every tensor that does not fit, and targets that the base does not have."""
    layers = [layer.projections(names) for layer in empty.layers if isinstance(layer, DenseLayer)]
    modules = {_last(module) for one in layers for paths, *_ in one.values() for module in paths}
    for adapter, targets in zip(adapters, _targets(empty, adapters, names), strict=True):
        problems = weights.misfits(targets, adapter.files, (), source=ADAPTER_CONFIG)
        unknown = [name for name in adapter.spec.targets if name not in modules]
        if unknown:
            what = f"target_modules names {len(unknown)} that the base does not have"
            problems.append(f"{what}: {some_of(unknown)}")
        if problems:
            raise UserError(
                "IDLM-0613",
                f"the tensors of {adapter.directory} do not fit {ADAPTER_CONFIG} and base; "
                f"{'; '.join(problems)}",
                fix=f"restore {ADAPTER_CONFIG} and {WEIGHTS_FILE} from the same export, or give base= the "
                "base that they were trained on",
            )


def add_adapters(
    trunk: DenseTrunk, adapters: Sequence[Adapter], names: TensorNames, mask_token_id: int | None
) -> None:
    """Load adapters that `check_adapters` allows onto a trunk with its weights. Raises UserError IDLM-0613
    for values that are not finite."""
    for adapter, targets in zip(adapters, _targets(trunk, adapters, names), strict=True):
        weights.copy(targets, adapter.files)
        loaded = {name: target.view for name, target in targets.items()}
        weights.require_finite("IDLM-0613", loaded, adapter.directory, fix=DIVERGED)
    if trunk.mask_rows_LD is not None:
        for row_D, adapter in zip(trunk.mask_rows_LD.data, adapters, strict=True):
            if not adapter.has_mask_row:
                row_D.copy_(trunk.embed[mask_token_id])
    trunk.num_adapters = len(adapters)


def _matrices(
    layer: DenseLayer,
    fused: str,
    modules: tuple[str, ...],
    sizes: tuple[int, ...],
    a_PrD: Tensor,
    b_Er: Tensor,
) -> dict[str, tuple[WeightTarget, WeightTarget]]:
    if fused in SUMMED:
        return {modules[0]: (target_of(a_PrD[0], layer.shards, 1), target_of(b_Er))}
    orders = row_orders(layer.spec, layer.shards, fused, len(modules))
    if len(modules) < len(a_PrD):
        # Each part of the one module has its A.
        a = WeightTarget(view=a_PrD, shape=tuple(a_PrD.shape[1:]))
        return {modules[0]: (a, row_target(b_Er, orders[0], layer.shards))}
    parts = zip(modules, a_PrD, b_Er.split(sizes), orders, strict=True)
    return {module: (target_of(a), row_target(b, order, layer.shards)) for module, a, b, order in parts}


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _targets(
    trunk: DenseTrunk, adapters: Sequence[Adapter], names: TensorNames
) -> list[dict[str, WeightTarget]]:
    """Targets of each adapter's tensors; creates the low-rank matrices as zeros, all of the largest rank."""
    found: list[dict[str, WeightTarget]] = [{} for _ in adapters]
    if any(adapter.has_mask_row for adapter in adapters):
        rows_LD = trunk.embed.new_zeros(len(adapters), trunk.spec.width)
        trunk.mask_rows_LD = nn.Parameter(rows_LD, requires_grad=False)
        for targets, adapter, row_D in zip(found, adapters, trunk.mask_rows_LD.data, strict=True):
            targets |= {MASK_ROW: target_of(row_D)} if adapter.has_mask_row else {}
    specs = [adapter.spec for adapter in adapters]
    rank = max((spec.rank for spec in specs), default=0)
    for number, layer in enumerate(trunk.layers if adapters else ()):
        assert isinstance(layer, DenseLayer)
        layer.lora = nn.ModuleDict()
        for fused, (modules, sizes, weight, bias) in layer.projections(names).items():
            scalings = tuple(spec.scaling for spec in specs)
            low = layer.lora[fused] = LowRank(sizes, weight, bias, rank=rank, scalings=scalings)
            for index, (targets, spec) in enumerate(zip(found, specs, strict=True)):
                matrices = low.matrices(index, spec.rank)
                for module, (a, b) in _matrices(layer, fused, modules, sizes, *matrices).items():
                    if _last(module) in spec.targets:
                        path = module.format(number)
                        targets |= {tensor_name(path, "A"): a, tensor_name(path, "B"): b}
    return found

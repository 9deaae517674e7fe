"""Loads a gated LoRA, a PEFT directory with gated=true in its semantics, onto the base it was trained on.
`idlm.lora` defines the computation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from idlm.checkpoint import ADAPTER_CONFIG, verify
from idlm.errors import UserError, some_of
from idlm.infer.models import weights
from idlm.infer.models.base import TensorNames
from idlm.infer.models.dense import SUMMED, DenseLayer, DenseTrunk, LowRank
from idlm.infer.models.targets import WeightTarget, row_orders, row_target, target_of
from idlm.lora import MASK_ROW, WEIGHTS_FILE, AdapterSpec, base_identity, tensor_name
from idlm.semantics import FILE_NAME as SEMANTICS_FILE
from idlm.semantics import Semantics


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    directory: Path
    base: Path
    spec: AdapterSpec
    semantics: Semantics
    files: dict[str, Path]

    @property
    def has_mask_row(self) -> bool:
        """Whether the adapter has its own embedding of MASK, so that the base needs no row for it."""
        return MASK_ROW in self.files


def open_adapter(directory: Path, *, base: str | Path | None, semantics: Semantics | None) -> Adapter:
    """Check an adapter without its weights. `base` overrides adapter_config.json, `semantics`
    idlm_config.json. Raises UserError IDLM-0302, 0607, 0610, and IDLM-0609 (not gated), 0611 (no base), 0612
    (another base)."""
    verify(directory, required=False)
    spec = AdapterSpec.load(directory)
    meaning = Semantics.load(directory) if semantics is None else semantics
    if not meaning.gated:
        raise UserError(
            "IDLM-0609",
            f"{directory} is a LoRA that is not gated ({SEMANTICS_FILE} with gated=true is missing): it was "
            "trained on all rows, and on MASK rows alone it would compute something else",
            fix="merge it into its base with peft's merge_and_unload, or train a gated one with idlm-train "
            "adapter.rank=...; one of others that is gated is imported by idlm-import",
        )
    files = dict.fromkeys(weights.tensor_names(directory / WEIGHTS_FILE), directory / WEIGHTS_FILE)
    path = base or spec.base_path
    if path is None or not (Path(path) / "config.json").is_file():
        where = "nowhere" if path is None else f"at {path}"
        raise UserError(
            "IDLM-0611",
            f"{directory} is an adapter, and its base model is {where}",
            fix="give base=PATH, the directory of the base model with config.json and weights",
        )
    if meaning.base_identity != base_identity(Path(path)):
        raise UserError(
            "IDLM-0612",
            f"{path} is not the base that {directory} was trained on: its weights differ",
            fix="give base=PATH with the weights that model.path named in training",
        )
    return Adapter(directory=directory, base=Path(path), spec=spec, semantics=meaning, files=files)


def check_adapter(empty: DenseTrunk, adapter: Adapter, names: TensorNames) -> None:
    """Compare the adapter with a trunk on the meta device, where no rank takes memory. Raises UserError
    IDLM-0613 with every tensor that does not fit, and targets that the base does not have."""
    targets = _targets(empty, adapter, names)
    problems = weights.misfits(targets, adapter.files, (), source=ADAPTER_CONFIG)
    layers = [layer.projections(names) for layer in empty.layers if isinstance(layer, DenseLayer)]
    modules = {_last(module) for one in layers for paths, *_ in one.values() for module in paths}
    unknown = [name for name in adapter.spec.targets if name not in modules]
    if unknown:
        what = f"target_modules names {len(unknown)} that the base does not have"
        problems.append(f"{what}: {some_of(unknown)}")
    if problems:
        raise UserError(
            "IDLM-0613",
            f"the tensors of {adapter.directory} do not fit {ADAPTER_CONFIG} and base; {'; '.join(problems)}",
            fix=f"restore {ADAPTER_CONFIG} and {WEIGHTS_FILE} from the same export, or give base= the "
            "base that they were trained on",
        )


def add_adapter(trunk: DenseTrunk, adapter: Adapter, names: TensorNames) -> None:
    """Load an adapter that `check_adapter` allows. Raises UserError IDLM-0613 for values that are not
    finite."""
    targets = _targets(trunk, adapter, names)
    weights.copy(targets, adapter.files)
    bad = [name for name, target in targets.items() if not bool(target.view.isfinite().all())]
    if bad:
        raise UserError(
            "IDLM-0613",
            f"{len(bad)} tensors of {adapter.directory} have values that are not finite, {bad[0]} first",
            fix="use an adapter of an earlier step, before its training diverged",
        )
    trunk.is_adapted = True


def _matrices(
    layer: DenseLayer, fused: str, modules: tuple[str, ...], low: LowRank
) -> dict[str, tuple[WeightTarget, WeightTarget]]:
    """Targets of the A and B of each module."""
    if fused in SUMMED:
        return {modules[0]: (target_of(low.a[0], layer.shards, 1), target_of(low.b_Er.data))}
    orders = row_orders(layer.spec, layer.shards, fused, len(modules))
    if len(modules) < len(low.sizes):
        # Each part of the one module has its A.
        rank = low.b_Er.shape[1]
        a_PrD = low.stacked.data[len(low.b_Er) :].view(len(low.sizes), rank, -1)
        a = WeightTarget(view=a_PrD, shape=tuple(a_PrD.shape[1:]))
        return {modules[0]: (a, row_target(low.b_Er.data, orders[0], layer.shards))}
    return {
        module: (target_of(a), row_target(b, order, layer.shards))
        for module, a, b, order in zip(modules, low.a, low.b, orders, strict=True)
    }


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _targets(trunk: DenseTrunk, adapter: Adapter, names: TensorNames) -> dict[str, WeightTarget]:
    """Targets of the adapter's tensors; creates the low-rank matrices as zeros."""
    spec, targets = trunk.spec, {}
    if adapter.has_mask_row:
        row_D = torch.zeros(spec.width, device=trunk.embed.device, dtype=trunk.embed.dtype)
        trunk.mask_row = nn.Parameter(row_D, requires_grad=False)
        targets[MASK_ROW] = target_of(trunk.mask_row)
    for number, layer in enumerate(trunk.layers):
        assert isinstance(layer, DenseLayer)
        layer.lora = nn.ModuleDict()
        for fused, (modules, sizes, weight, bias) in layer.projections(names).items():
            low = LowRank(sizes, weight, bias, rank=adapter.spec.rank, scaling=adapter.spec.scaling)
            layer.lora[fused] = low
            given = [module for module in modules if _last(module) in adapter.spec.targets]
            for module, (a, b) in _matrices(layer, fused, modules, low).items():
                if module in given:
                    path = module.format(number)
                    targets |= {tensor_name(path, "A"): a, tensor_name(path, "B"): b}
    return targets

"""A static toy of the kv side: of the slots before a block its rows see every second page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from idlm.infer.sparse.accelerator import ACCELERATORS, KVAccelerator, KVPass, PassView


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenPagesConfig:
    """`page`: slots of a page."""

    page: int = 4


class EvenPagesPass(KVPass):
    """Lists pages 0, 2, 4, ..., as far as they lie before the block."""

    def __init__(self, view: PassView, config: EvenPagesConfig) -> None:
        super().__init__(view, is_sparse_B=view.is_working_B)
        self._config = config

    def select_kv(self, layer: int, q_RNH: Tensor) -> Tensor:
        view, page = self.view, self._config.page
        first_P = torch.arange(0, view.max_slots, 2 * page, device=q_RNH.device)
        slots_C = (first_P[:, None] + torch.arange(page, device=q_RNH.device)).flatten()
        slots_BC = torch.where(slots_C < view.active.starts_B[:, None], slots_C, -1)
        return slots_BC[:, None].expand(-1, view.cache.keys.shape[2], -1)


@ACCELERATORS.register("even_pages")
class EvenPages(KVAccelerator):
    name: ClassVar[str] = "even_pages"
    Config: ClassVar[type] = EvenPagesConfig
    is_static: ClassVar[bool] = True

    def begin(self, view: PassView) -> EvenPagesPass:
        return EvenPagesPass(view, self.config)

"""Which slots before a block its rows attend to while it is denoised, and what accelerators choose of them.

`Probe` runs a checkpoint through transformers' modules, layer by layer: the context once, then passes over a
block, of which it stores the queries. Sets are computed from these with exact attention in every pass, as in
MAGE's paper (ICML 2026 workshop AdaptFM, equations 1 and 2): what a set misses changes no later pass.
W positions of a block, P slots before it, R rows, N query heads, K KV heads, G = N / K, H head dim, D width,
T pages, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ARMS = ("mage", "quest", "sparsed")
PAGE, EXACT_SHARE = 16, 0.2
"""Of Quest; of SparseD's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Of one layer in one pass: the block's queries, and the keys of the slots before it."""

    q_WNH: Tensor
    k_PKH: Tensor


class Probe:
    """A checkpoint of the Qwen3 kind in float32, run block-causally with blocks of `size`."""

    def __init__(self, directory: Path, size: int, device: torch.device) -> None:
        import transformers

        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model = self.model.to(device).eval()
        self.size, self.device = size, device

    def read(self, ids: Sequence[int]) -> None:
        """Compute and store the keys and values of a context of whole blocks."""
        assert len(ids) % self.size == 0, f"{len(ids)=} {self.size=}"
        self._before: list[tuple[Tensor, Tensor]] = []
        self._before = [(k, v) for _, k, v in self._run(list(ids))[1]]

    def look(self, block: Sequence[int]) -> tuple[Tensor, list[Looks]]:
        """Logits [W, V] of a pass over a block after the context, and what each layer's rows look with."""
        hidden_WD, layers = self._run(list(block))
        looks = [
            Looks(q_WNH=q_WNH, k_PKH=before[0])
            for (q_WNH, _, _), before in zip(layers, self._before, strict=True)
        ]
        logits_WV: Tensor = self.model.lm_head(self.model.model.norm(hidden_WD))
        return logits_WV, looks

    @torch.no_grad()
    def _run(self, ids: list[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
        """Hidden states [R, D] after the last layer; queries, keys and values of every layer."""
        core = self.model.model
        hidden_RD = core.embed_tokens(torch.tensor(ids, device=self.device))
        start = len(self._before[0][0]) if self._before else 0
        index_R = start + torch.arange(len(ids), device=self.device)
        cos, sin = core.rotary_emb(hidden_RD[None], index_R[None])
        tables = (cos[0][:, None], sin[0][:, None])
        index_P = torch.arange(start + len(ids), device=self.device)
        sees_RP = index_P[None] // self.size <= index_R[:, None] // self.size
        found = []
        for number, layer in enumerate(core.layers):
            before = self._before[number] if self._before else None
            hidden_RD, own = _layer(layer, hidden_RD, tables, before, sees_RP)
            found.append(own)
        return hidden_RD, found


def _layer(
    layer: Any,
    hidden_RD: Tensor,
    tables: tuple[Tensor, Tensor],
    before: tuple[Tensor, Tensor] | None,
    sees_RP: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    attention, normed_RD = layer.self_attn, layer.input_layernorm(hidden_RD)
    q_RNH, k_RKH, v_RKH = (
        projection(normed_RD).view(len(hidden_RD), -1, attention.head_dim)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q_RNH, k_RKH = (
        x * tables[0] + _turned(x) * tables[1] for x in (attention.q_norm(q_RNH), attention.k_norm(k_RKH))
    )
    keys, values = k_RKH, v_RKH
    if before is not None:
        keys, values = torch.cat([before[0], keys]), torch.cat([before[1], values])
    query, key, value = (x.transpose(0, 1)[None] for x in (q_RNH, keys, values))
    mixed_NRH = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=sees_RP, enable_gqa=True
    )[0]
    hidden_RD = hidden_RD + attention.o_proj(mixed_NRH.transpose(0, 1).flatten(1))
    out_RD: Tensor = hidden_RD + layer.mlp(layer.post_attention_layernorm(hidden_RD))
    return out_RD, (q_RNH, k_RKH, v_RKH)


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@torch.no_grad()
def denoise(probe: Probe, block: Sequence[int], mask: int, steps: int) -> list[list[int]]:
    """What each of at most `steps` passes over a block reads: every pass decides the same number of masks,
    the most confident ones, greedily.
    """
    now = list(block)
    quota = math.ceil(now.count(mask) / steps)
    read = []
    while mask in now:
        read.append(list(now))
        logits_WV, _ = probe.look(now)
        logits_WV[:, mask] = -math.inf
        confidence_W, tokens_W = logits_WV.softmax(dim=-1).max(dim=-1)
        masked = [index for index, token in enumerate(now) if token == mask]
        sure = confidence_W.tolist()
        for index in sorted(masked, key=lambda index: -sure[index])[:quota]:
            now[index] = int(tokens_W[index])
    return read


def shares(looks: Looks) -> Tensor:
    """Softmax over the slots before the block, averaged over the G heads of a KV head: [K, W, P]."""
    num_kv_heads, head_dim = looks.k_PKH.shape[1:]
    q_WKGH = looks.q_WNH.unflatten(1, (num_kv_heads, -1))
    scores_KGWP = torch.einsum("wkgh,pkh->kgwp", q_WKGH, looks.k_PKH) * head_dim**-0.5
    return scores_KGWP.softmax(dim=-1).mean(dim=1)


def largest(scores: Tensor, num: int) -> Tensor:
    """Bool, true at the `num` largest of the last dimension."""
    indices = scores.topk(min(num, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, True)


def quest_set(looks: Looks, k: int) -> Tensor:
    """The slots of the pages with the largest upper bounds, bool [K, P]; see infer/accelerators/quest.py."""
    num_slots, num_kv_heads, _ = looks.k_PKH.shape
    padding = -num_slots % PAGE
    # The last key stands in for slots that are not there: no bound changes.
    keys = torch.cat([looks.k_PKH, looks.k_PKH[-1:].expand(padding, -1, -1)]).unflatten(0, (-1, PAGE))
    min_TKH, max_TKH = keys.amin(dim=1), keys.amax(dim=1)
    q_WKGH = looks.q_WNH.unflatten(1, (num_kv_heads, -1))
    # max(q least, q most) is q most where q is positive, else q least. Means of both over queries are enough.
    up_KH, down_KH = (part.mean(dim=(0, 2)) for part in (q_WKGH.clamp(min=0), q_WKGH.clamp(max=0)))
    bounds_KT = torch.einsum("kh,tkh->kt", up_KH, max_TKH) + torch.einsum("kh,tkh->kt", down_KH, min_TKH)
    pages_KT = largest(bounds_KT, math.ceil(k / PAGE))
    return pages_KT.repeat_interleave(PAGE, dim=1)[:, :num_slots]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Of one block, by arm and pass, over layers and KV heads: `recall` of the per-block oracle set
    (equation 2), `estimation`, the share of each row's own oracle set (equation 1), of arm `oracle` too. A
    pass that an arm computes exactly has no entry.
    """

    recall: dict[tuple[str, int], float]
    estimation: dict[tuple[str, int], float]


def num_exact_passes(arm: str, num_passes: int) -> int:
    by_arm = {"mage": 1, "sparsed": math.ceil(round(EXACT_SHARE * num_passes, 6))}
    return by_arm.get(arm, 0)


@torch.no_grad()
def fidelity(probe: Probe, read: Sequence[Sequence[int]], *, k: int, exact_layers: int) -> Fidelity:
    """Compare sets of `k` slots in the passes that read `read`, after the context that `probe` has read."""
    kept: dict[tuple[str, int], Tensor] = {}
    recalls: dict[tuple[str, int], list[float]] = {}
    covered: dict[tuple[str, int], list[float]] = {}
    for step, block in enumerate(read):
        for layer, looks in enumerate(probe.look(block)[1][exact_layers:]):
            shares_KWP = shares(looks)
            own_KWP, oracle_KP = largest(shares_KWP, k), largest(shares_KWP.mean(dim=1), k)
            size = int(oracle_KP[0].sum())
            sets_KP = {"oracle": oracle_KP, "quest": quest_set(looks, k)}
            for arm in ("mage", "sparsed"):
                num_exact = num_exact_passes(arm, len(read))
                if step == num_exact - 1:
                    kept[arm, layer] = oracle_KP
                elif step >= num_exact:
                    sets_KP[arm] = kept[arm, layer]
            for arm, set_KP in sets_KP.items():
                both = float((set_KP & oracle_KP).sum(dim=1).double().mean()) / size
                recalls.setdefault((arm, step), []).append(both)
                mine = float((set_KP[:, None] & own_KWP).sum(dim=2).double().mean()) / size
                covered.setdefault((arm, step), []).append(mine)
    return Fidelity(recall=_means(recalls), estimation=_means(covered))


def _means(values: dict[tuple[str, int], list[float]]) -> dict[tuple[str, int], float]:
    return {key: sum(each) / len(each) for key, each in values.items()}

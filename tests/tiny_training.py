"""Random tiny models and batches for the training tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from idlm.masks import RowMeta
from idlm.tasks.tokenizer import save_tokenizer
from idlm.train.data.dataset import collate
from idlm.train.data.layout import Sample, SampleRows, pack_rows
from idlm.train.model.load import random_model
from idlm.train.objectives.base import Batch, Head, Objective, Terms
from idlm.train.objectives.curriculum import Stage
from idlm.train.objectives.idlm import IntrospectiveConsistency
from idlm.train.step import BodyAndHead

FAMILIES = ("qwen3", "qwen2", "llama")
VOCAB = 64
MASK = 63


class HiddenStates(BodyAndHead):
    """The trainer's forward pass of a model, up to its last hidden states."""

    def hidden(self, model: torch.nn.Module, batch: Batch, attention: str) -> torch.Tensor:
        """Last hidden states [B, T, D] of a collated batch, differentiable."""
        found: list[torch.Tensor] = []

        def compute(head: Head, hidden_BTD: torch.Tensor) -> Terms:
            found.append(hidden_BTD)
            return Terms(sums=torch.zeros(1))

        self.terms(model, batch, attention, compute)
        return found[0]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] of hidden states [M, D]."""
        return self.lm_head(hidden)


def tiny_config(family: str) -> dict[str, Any]:
    config = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return config | ({"head_dim": 16} if family == "qwen3" else {})


def tiny_model(family: str, attention: str = "idlm_sdpa", **fields: Any) -> Any:
    config = tiny_config(family) | fields
    return random_model(config, attention=attention, dtype=torch.float32, seed=0).eval()


def write_tiny_base(directory: Path) -> Path:
    """A random Qwen3 with 192 rows, of which the task tokenizer leaves some to spare."""
    config = tiny_config("qwen3") | {"vocab_size": 192}
    random_model(config, attention="idlm_sdpa", dtype=torch.float32, seed=0).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def tiny_objective(mask_region: str = "response") -> IntrospectiveConsistency:
    return IntrospectiveConsistency(mask_token_id=MASK, mask_region=mask_region)


def random_sample(seed: int, *, prompt: int, response: int) -> Sample:
    token_ids = np.random.default_rng(seed).integers(0, VOCAB - 1, size=prompt + response).tolist()
    return Sample.from_pair(token_ids[:prompt], token_ids[prompt:], origin=f"sample {seed}")


def stage_of(stride: int, clean_weight: float | None = 0.2) -> Stage:
    return Stage(index=0, stride=stride, num_steps=1, clean_weight=clean_weight)


def collated(documents: list[SampleRows], *, padding: int = 0) -> Batch:
    row = pack_rows(documents, sum(map(len, documents)) + padding, pad_token_id=0)
    return collate([row | {"item_id": 0, "stage": 0}])


def meta_of(batch: Batch) -> RowMeta:
    """What the rows of a batch see of each other."""
    return RowMeta(
        doc_ids=batch["doc_ids"],
        positions=batch["position_ids"],
        block_starts=batch["block_starts"],
        is_noisy=batch["is_noisy"],
        reach=batch["reach"],
    )


def batch_of(
    samples: list[Sample], objective: Objective, stage: Stage, *, padding: int = 0
) -> dict[str, torch.Tensor]:
    """A collated micro-batch of one packed row."""
    total = sum(objective.num_rows(len(sample), sample.num_targets) for sample in samples) + padding
    row = pack_rows([objective.rows(sample, stage) for sample in samples], total, pad_token_id=0)
    return collate([row | {"item_id": 0, "stage": 0}])

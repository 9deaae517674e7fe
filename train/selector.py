"""Trains a selector of drafts on a finished checkpoint, whose weights stay as they are:

    python -m idlm.train.selector recipe=selector model.path=outputs/smollm2_lora data.path=chats.jsonl

The options are those of `idlm-train`, without stages. The model runs over rows `[x_t | x_0]` of the
checkpoint's own stride. The distribution of each mask, in which the selector's scores after the true token
before replace the logits of the 16 likeliest tokens, is trained by cross-entropy; with
`train.distill=overlap` by its overlap with the distribution of the clean row, which is the expected
acceptance. A mask predicts the token after its own position, so the token at that position is the
predecessor. `output_dir` gets a copy of the checkpoint with the selector in it.

Shape letters: M masks of a batch, V vocabulary, D width, K candidates."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from idlm.checkpoint import ADAPTER_CONFIG, FOR_PEOPLE, own_files, verify
from idlm.cli import command
from idlm.config.compose import compose
from idlm.errors import UserError
from idlm.files.disk import MANIFEST
from idlm.kernels.draft_walk import path_scores
from idlm.lora import WEIGHTS_FILE, AdapterSpec
from idlm.publish import publish
from idlm.selector import NUM_CANDIDATES, SELECTOR_FILE, SELECTOR_WIDTH, PathWeights
from idlm.semantics import Semantics
from idlm.train.check import check_config
from idlm.train.config.schema import AdapterConfig, StageConfig, TrainConfig
from idlm.train.data.dataset import collate
from idlm.train.distributed.deepspeed import route_library_output
from idlm.train.model.gated_lora import is_trained, peft_tensors
from idlm.train.objectives.base import Batch, Head, Terms
from idlm.train.objectives.curriculum import rate_factor
from idlm.train.pipeline import training_arguments
from idlm.train.prepare import Prepared, prepare
from idlm.train.step import BodyAndHead

SMALL = 0.02
"""Standard deviation of new weights of A."""
CHUNK_LOGITS = 1 << 26
"""Logits that are in memory at once."""
BETAS = (0.9, 0.95)


class PathModule(nn.Module):
    """The path selector while it trains, in fp32; it starts as one that changes no score."""

    def __init__(self, num_tokens: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        shape, bound = (num_tokens, SELECTOR_WIDTH), 1 / math.sqrt(width)
        self.previous_VW = nn.Parameter(torch.randn(shape, generator=generator) * SMALL)
        self.candidate_VW = nn.Parameter(torch.zeros(shape))
        hidden_WD = torch.empty(SELECTOR_WIDTH, width).uniform_(-bound, bound, generator=generator)
        self.hidden_WD = nn.Parameter(hidden_WD)

    def weights(self) -> PathWeights:
        return PathWeights(self.previous_VW, self.candidate_VW, self.hidden_WD)


@dataclass(slots=True)
class Losses:
    """Sums over masks: their number, those whose true token is a candidate, the loss, and the expected
    acceptance of plain drafts and of the selector's, after the true tokens."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))

    def text(self) -> str:
        masks, among, loss, plain, selected = self.sums.tolist()
        return (
            f"loss {loss / masks:.4f}  among the candidates {among / masks:.3f}  "
            f"acceptance {plain / masks:.4f} -> {selected / masks:.4f}"
        )


def main(arguments: list[str]) -> int:
    train_selector(compose("train", TrainConfig, arguments), print_line=partial(print, flush=True))
    return 0


def train_selector(config: TrainConfig, *, print_line: Callable[[str], Any] = print) -> PathModule:
    """Train and publish. UserError IDLM-0521 for a checkpoint without masks, and those of `idlm-train`."""
    route_library_output()
    checkpoint = Path(config.model.path or "")
    semantics = Semantics.load(checkpoint)
    if semantics.causality != "causal" or semantics.stride == 1:
        raise UserError(
            "IDLM-0521",
            f"model.path={checkpoint} is not a converted checkpoint: it has no masks to draw drafts from",
            fix="give the directory that idlm-train wrote, a whole model or an adapter",
        )
    takes_overlap = config.train.distill == "overlap"
    config = of_checkpoint(config, checkpoint, semantics)
    check_config(config)
    args = training_arguments(config)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    prepared = prepare(config, world_size=1, device=args.device)
    if prepared.adapter is not None:
        load_adapter(prepared.model, checkpoint)
    prepared.model.requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(config.train.seed)
    head_VD = prepared.model.get_output_embeddings().weight
    module = PathModule(len(head_VD), head_VD.shape[1], generator).to(head_VD.device)
    num = sum(weight.numel() for weight in module.parameters())
    print_line(
        f"selector of {num:,} weights, {prepared.curriculum.num_steps} steps, stride {semantics.stride}"
    )
    _run(config, prepared, module, print_line, takes_overlap=takes_overlap)
    save(module, checkpoint, replace(semantics, selector="path"), Path(config.output_dir))
    print_line(f"checkpoint with the selector in {config.output_dir}")
    return module


def of_checkpoint(config: TrainConfig, checkpoint: Path, semantics: Semantics) -> TrainConfig:
    """The configuration of one stage that lays rows out as the checkpoint was trained; an adapter's base is
    the model."""
    verify(checkpoint, required=False)
    stage = StageConfig(stride=semantics.stride, steps=config.train.steps, fraction=None, clean_weight=0.0)
    if config.train.steps is None:
        stage = replace(stage, fraction=1.0)
    model = replace(config.model, mask_token_id=semantics.mask_token_id)
    adapter = None
    if (checkpoint / ADAPTER_CONFIG).is_file():
        spec = AdapterSpec.load(checkpoint)
        adapter = AdapterConfig(rank=spec.rank, alpha=spec.alpha, targets=list(spec.targets))
        model = replace(model, path=spec.base_path)
    train = replace(config.train, stages=[stage], steps=None if stage.steps else config.train.steps)
    return replace(
        config,
        objective="idlm",
        mask_region=cast(Any, semantics.mask_region),
        model=model,
        adapter=adapter,
        train=replace(
            train,
            distill="none",
            draft_input=cast(Any, semantics.draft_input or "mask"),
            noise_range=list(semantics.noise_range),
        ),
    )


def load_adapter(model: nn.Module, directory: Path) -> None:
    """Copy the adapter's weights into a model that `prepare` has adapted."""
    stored = load_file(directory / WEIGHTS_FILE)
    own = {name: value for name, value in model.state_dict().items() if is_trained(name)}
    for name, value in own.items():
        (peft_name,) = peft_tensors({name: value})
        value.copy_(stored[peft_name])


def _run(
    config: TrainConfig,
    prepared: Prepared,
    module: PathModule,
    print_line: Callable[[str], Any],
    *,
    takes_overlap: bool,
) -> None:
    loop, curriculum = config.train, prepared.curriculum
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=loop.learning_rate, betas=BETAS, weight_decay=loop.weight_decay
    )
    runner, device = BodyAndHead(prepared.model), prepared.model.device
    rate_of = partial(
        rate_factor, curriculum=curriculum, schedule=loop.schedule, warmup=loop.warmup, decay=loop.decay
    )
    seen, num_steps = Losses(), curriculum.num_steps
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = loop.learning_rate * rate_of(step)
        for number in range(curriculum.global_batch // loop.batch_size):
            first = step * curriculum.global_batch + number * loop.batch_size
            batch = collate([prepared.dataset[first + item] for item in range(loop.batch_size)])
            moved = {name: value.to(device) for name, value in batch.items()}
            compute = partial(_terms, module, moved, seen, takes_overlap, runner.divisor)
            with torch.no_grad():
                runner.terms(prepared.model, moved, prepared.attention, compute)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % loop.log_every == 0 or step + 1 == num_steps:
            print_line(f"step {step + 1}/{num_steps}  {seen.text()}")
            seen.sums.zero_()


def _terms(
    module: PathModule,
    batch: Batch,
    seen: Losses,
    takes_overlap: bool,
    divisor: float,
    head: Head,
    hidden_BTD: Tensor,
) -> Terms:
    """Add the gradients of a batch to the selector, in chunks of masks; the terms are empty."""
    hidden_RD, ids_R = hidden_BTD.flatten(0, 1), batch["input_ids"].flatten()
    noisy_M, clean_M = batch["noisy_index"], batch["clean_index"]
    size = max(1, CHUNK_LOGITS // len(head.weight_VD))
    for noisy_m, clean_m in zip(noisy_M.split(size), clean_M.split(size), strict=True):
        tokens = ids_R[clean_m], batch["labels"].flatten()[noisy_m]
        rows = hidden_RD[noisy_m], hidden_RD[clean_m]
        logits = [nn.functional.linear(rows_mD, head.weight_VD, head.bias_V) for rows_mD in rows]
        # What the head reads is divided; a selector reads what the final norm gave.
        own_mD = rows[0] * divisor
        loss, sums = selector_loss(module.weights(), logits, own_mD, tokens, takes_overlap=takes_overlap)
        # A quotient would have no gradient here.
        loss.backward(torch.full_like(loss, 1 / len(noisy_M)))
        seen.sums += sums.cpu()
    return Terms(sums=hidden_BTD.new_zeros(1))


@torch.enable_grad()
def selector_loss(
    weights: PathWeights,
    logits: list[Tensor],
    hidden_MD: Tensor,
    tokens: tuple[Tensor, ...],
    *,
    takes_overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    """The summed loss of some masks, and the sums of `Losses`. `logits` [M, V]: of the masks and of the clean
    rows that predict the same tokens; `tokens` [M]: those before, and those predicted."""
    draft_MV, clean_MV = (one.detach().float() for one in logits)
    previous_M, labels_M = tokens
    values_MK, ids_MK = draft_MV.topk(min(NUM_CANDIDATES, draft_MV.shape[1]), dim=-1)
    projected_MW = nn.functional.linear(hidden_MD.float(), weights.hidden_WD)
    scores_MK = path_scores(*weights[:2], previous_M, ids_MK, values_MK, projected_MW)
    logs_MV = draft_MV.scatter(1, ids_MK, scores_MK).log_softmax(-1)
    p_MV = clean_MV.softmax(-1)
    overlap = torch.minimum(p_MV, logs_MV.exp()).sum()
    loss = len(labels_M) - overlap if takes_overlap else -logs_MV.gather(1, labels_M[:, None]).sum()
    plain = torch.minimum(p_MV, draft_MV.softmax(-1)).sum()
    is_among_M = (ids_MK == labels_M[:, None]).any(-1)
    sums = (torch.tensor(len(labels_M)), is_among_M.sum(), loss, plain, overlap)
    return loss, torch.stack([one.detach().double().cpu() for one in sums])


def save(module: PathModule, checkpoint: Path, semantics: Semantics, target: Path) -> None:
    """Publish a copy of the checkpoint with the selector in it, in the dtype of training."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in module.weights()._asdict().items()}
    texts = {checkpoint / name for name in FOR_PEOPLE}
    files = (own_files(checkpoint) or set(checkpoint.iterdir())) | texts
    with publish(target) as staging:
        for path in sorted(files):
            if path.is_file() and path.name != MANIFEST:
                copied = staging / path.relative_to(checkpoint)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copied)
        save_file(tensors, staging / SELECTOR_FILE, metadata={"format": "pt"})
        semantics.save(staging)


if __name__ == "__main__":
    sys.exit(command.run(main))

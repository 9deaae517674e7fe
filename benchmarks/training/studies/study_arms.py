"""The arms of the study (benchmarks/training/studies/study.py): what each trains and how it is decoded.

Every arm starts from the base of its seed. All do as many FLOPs as `ar`, counted as the plan of
idlm-train does (`flops_per_step`), so that an arm with fewer FLOPs a step takes more steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.training.studies.study_no_shift import NAME as NO_SHIFT
from idlm.config.compose import compose
from idlm.errors import UserError
from idlm.tasks import TASKS, Task
from idlm.train.config.schema import TrainConfig

BASE, CONTROL = "base", "ar"
THRESHOLD, TAU = 0.9, 0.5
COLD, BRANCH, DETERMINISTIC = "cold", "branch", "deterministic"
CHAINS = {"short": (4, 8), "long": (12, 16)}
"""Steps of the problems that are asked; training has all from the shortest to the longest."""
LEVEL = "p4"
MAX_LENGTH, MAX_TOKENS = 544, 440
BASE_RATE, ARM_RATE, LORA_RATE = 2e-3, 7e-4, 3e-3
"""Peaks of the cosine at a width of 256. At the base's rate the control fell from 81 to 67 % of short chains
in 600 steps.
"""
TASK_ARGS = f"{{min_steps: {CHAINS['short'][0]}, max_steps: {CHAINS['long'][1]}}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model with `parameters` weights and its batches; `rate` multiplies all peaks of learning rates."""

    parameters: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    head_dim: int
    batch: int
    row_length: int
    rate: float = 1.0

    def model(self) -> list[str]:
        """Overrides for new weights."""
        values = {
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "head_dim": self.head_dim,
            "tie_word_embeddings": "true",
            "max_position_embeddings": 2048,
        }
        return [*(f"+model.config.{key}={value}" for key, value in values.items()), "model.tokenizer=task"]


SIZES = {
    # A bf16 checkpoint takes 9.6 MB.
    "small": Size(
        parameters=4_771_840, hidden=256, ffn=768, layers=6, heads=4, head_dim=64, batch=32, row_length=1152
    ),
    # A step of Adam changes a product, also that with A of a LoRA, by rate times width: rates are 256 / 640.
    "large": Size(
        parameters=49_289_600,
        hidden=640,
        ffn=1920,
        layers=10,
        heads=10,
        head_dim=64,
        batch=32,
        row_length=1152,
        rate=0.4,
    ),
    "toy": Size(
        parameters=27_872, hidden=32, ffn=48, layers=2, heads=4, head_dim=16, batch=1, row_length=1152
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way to decode an arm, or with `of_base` the checkpoint of its base; `label` names it in rows."""

    label: str
    decoder: str
    temperature: float
    engine: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    of_base: bool = False


def _both(label: str, decoder: str, **engine: Any) -> tuple[Cell, ...]:
    return tuple(Cell(label=label, decoder=decoder, temperature=t, engine=engine) for t in (0.0, 1.0))


AR = _both("ar", "ar")
_COLD = {"rejection_strategy": COLD}
COLDS, BRANCHES = _both(COLD, "isd", **_COLD), _both(BRANCH, "isd", rejection_strategy=BRANCH)
STRIDED = (*COLDS, *BRANCHES)
RELAXED = Cell(label=f"tau_{TAU}", decoder="isd", temperature=1.0, engine=_COLD, sampling={"tau": TAU})
PUBLISHED = Cell(
    label="published", decoder="isd", temperature=1.0, engine={**_COLD, "acceptance": "published"}
)
FIXED = tuple(
    replace(
        cell,
        label=f"{cell.label}_{DETERMINISTIC}",
        engine=cell.engine | {DETERMINISTIC: True},
        of_base=cell.decoder == "ar",
    )
    for cell in (AR[0], COLDS[0], BRANCHES[0])
)
"""Greedy answers of the base and of the gated LoRA on it; the bits of a row do not depend on its pass."""
BLOCKS = (
    *_both("sequential", "block", strategy="sequential"),
    *_both(f"threshold_{THRESHOLD}", "block", strategy="low_confidence_dynamic", threshold=THRESHOLD),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """`overrides` of idlm-train beside the common ones; `stride` 1 decides one token a pass; `rate` is the
    peak of its learning rate on a base.
    """

    overrides: tuple[str, ...]
    cells: tuple[Cell, ...]
    stride: int = 1
    rate: float = ARM_RATE


def _strided(
    stride: int,
    cells: tuple[Cell, ...],
    *overrides: str,
    stages: str | None = None,
    phase: str = "response",
    objective: str = "idlm",
) -> Arm:
    """An I-DLM: the stages of recipe tiny (strides in turn, the last one balanced), or `stages`."""
    if stages is None:
        before = [one for one in (2, 3, 4) if one < stride]
        share = round(0.5 / len(before), 3) if before else 0.0
        listed = [f"{{stride: {one}, fraction: {share}, clean_weight: 0.2}}" for one in before]
        rest = round(1 - share * len(before), 3)
        stages = ", ".join([*listed, f"{{stride: {stride}, fraction: {rest}, clean_weight: auto}}"])
    common = (f"objective={objective}", f"train.stages=[{stages}]", f"train.phase={phase}")
    return Arm(overrides=(*common, *overrides), cells=cells, stride=stride)


def _drafting(distill: str = "none", *, cells: tuple[Cell, ...] = ()) -> Arm:
    """R-ISD: a gated LoRA, whose clean rows are the base's and have no loss."""
    stages = "{stride: 2, fraction: 0.25}, {stride: 3, fraction: 0.25}, {stride: 4, fraction: 0.5}"
    adapter = ("adapter.rank=64", "adapter.alpha=128", f"train.distill={distill}")
    arm = _strided(4, (AR[0], *STRIDED, *cells), *adapter, stages=stages)
    return replace(arm, rate=LORA_RATE)


_FIXED = ", ".join(
    f"{{stride: {stride}, fraction: {share}, clean_weight: 0.2}}"
    for stride, share in ((2, 0.25), (3, 0.25), (4, 0.5))
)
ARMS = {
    BASE: Arm(overrides=("objective=ar",), cells=AR),
    CONTROL: Arm(overrides=("objective=ar",), cells=AR),
    # Cells of one engine stand next to each other. `block_4` is the arm with blocks that are bidirectional,
    # without the shift of logits: the block diffusion of the paper's Figure 6(a).
    "idlm_4": _strided(4, (AR[0], *COLDS, RELAXED, *BRANCHES, PUBLISHED)),
    "block_4": Arm(
        overrides=("objective=block", "train.stages=[{stride: 4, fraction: 1.0}]"), cells=BLOCKS, stride=4
    ),
    "lora_4": _drafting(cells=FIXED),
    "idlm_2": _strided(2, STRIDED),
    "idlm_3": _strided(3, STRIDED),
    "idlm_8": _strided(8, STRIDED),
    # Ablations of idlm_4, and of lora_4.
    "no_balance": _strided(4, STRIDED, stages=_FIXED),
    "no_curriculum": _strided(4, STRIDED, stages="{stride: 4, fraction: 1.0, clean_weight: auto}"),
    # Compared in training alone (study_no_shift.py).
    NO_SHIFT: _strided(4, AR[:1], objective=NO_SHIFT),
    "random_phase": _strided(4, STRIDED, phase="random"),
    "lora_kl": _drafting("kl"),
    "lora_overlap": _drafting("overlap"),
}


def chosen_arms(names: str) -> list[str]:
    """The arms of `arms=` in their order, the base first; UserError IDLM-0107 for an unknown one."""
    wanted = list(ARMS) if names == "all" else names.split(",")
    unknown = [name for name in wanted if name not in ARMS]
    if unknown:
        raise UserError(
            "IDLM-0107", f"arms={','.join(unknown)}", fix=f"give all, or some of {', '.join(ARMS)}"
        )
    return sorted(wanted, key=lambda name: name != BASE)


def train_arguments(
    name: str,
    size: Size,
    *,
    seed: int,
    base: Path | None,
    output: Path,
    steps: int,
    device: str,
    workers: int,
) -> list[str]:
    """The command line of idlm-train for an arm; `base` None: new weights."""
    start = size.model() if base is None else [f"model.path={base}"]
    is_gpu = device == "cuda"
    return [
        f"output_dir={output}",
        "mask_region=response",
        "export.dtype=bfloat16",
        "report.enabled=false",
        "data.source=task",
        f"data.level={LEVEL}",
        f"data.task_args={TASK_ARGS}",
        # The arms see other samples than their base.
        f"data.seed={2 * seed + (name != BASE)}",
        f"train.seed={seed}",
        f"train.steps={steps}",
        f"train.batch_size={size.batch}",
        f"train.max_length={MAX_LENGTH}",
        f"train.row_length={size.row_length}",
        f"train.learning_rate={size.rate * (BASE_RATE if base is None else ARMS[name].rate):g}",
        "train.warmup=0.03",
        "train.weight_decay=0.01",
        "train.adam_beta2=0.98",
        f"train.bf16={str(is_gpu).lower()}",
        f"train.device={device}",
        # The base trains alone.
        f"train.workers={(2 if name == BASE else 1) * workers if is_gpu else 0}",
        f"train.log_every={max(1, min(50, steps // 10))}",
        # An arm that is cut off goes on in the next run.
        f"train.save_every={max(1, steps // (4 if name == BASE else 2))}",
        "train.save_total_limit=1",
        *start,
        *ARMS[name].overrides,
    ]


FLOPS_ITEMS = 256
"""Packed rows whose mean is the FLOPs of a step: 8 left 3 % between arms."""


def planned_flops(arguments: list[str]) -> float:
    """FLOPs of an average step of this command line, by the plan of `dry_run=true`; nothing is loaded."""
    from idlm.train.planning.dry_run import mask_choice, meta_model
    from idlm.train.planning.estimate import estimate_run
    from idlm.train.prepare import make_objective, prepare_adapter, prepare_data, prepare_tokenizer

    config = compose("train", TrainConfig, arguments)
    # Any rate will do: FLOPs are asked for, not seconds.
    config.plan.tflops = 1.0
    tokenizer = prepare_tokenizer(config)
    # An adapter needs a stored base, FLOPs its shape alone.
    model = meta_model(replace(config, adapter=None), tokenizer)
    mask_token_id, *_ = mask_choice(config, model, tokenizer)
    prepare_adapter(config, model, None)
    objective = make_objective(config, model, tokenizer, mask_token_id)
    data = prepare_data(config, tokenizer, objective, mask_token_id, 1)
    estimate = estimate_run(config, model, data.dataset, data.curriculum, gpus=1, num_sampled=FLOPS_ITEMS)
    assert estimate is not None and estimate.time is not None
    return estimate.time.flops_per_step + estimate.time.extra_flops


def flops_per_step(name: str, size: Size, *, device: str) -> float:
    """Of an arm, from new weights of the same shape."""
    # Fractions of stages need some steps to split.
    return planned_flops(
        train_arguments(
            name, size, seed=0, base=None, output=Path("study"), steps=20, device=device, workers=0
        )
    )


def task_of(chain: str) -> Task:
    """The task whose held-out problems have a `chain` of steps."""
    low, high = CHAINS[chain]
    task: Task = TASKS.get("ledger")(level=LEVEL, min_steps=low, max_steps=high)
    return task

"""The highest acceptance that drafts can have which do not know the tokens before them.

    python -m benchmarks.ceiling model=PATH [prompts=text] [answers=100] [positions=4] [continuations=256]
        [max_tokens=256] [temperature=1.0] [drafts=3] [device=cuda] [record=true]

ISD drafts x_{1+j} from masks, without x_1 .. x_j, which are drawn only later, and accepts it with
probability E[sum_v min(p(v | x_1 .. x_j), q(v))]. The largest value over all q is a bound for every model
that drafts: the entropy of the checkpoint alone decides it. It is estimated from `continuations` of each
context: their own best q (`fitted`, too high for few continuations), and the mean of one half judged on the
other (`held_out`, which a draft can reach). Contexts are `positions` of each of `answers`, which the model
draws itself at `temperature` to `prompts` (as of idlm-bench: a file, a task or `text`). Greedy drafts have
no such bound: x_1 follows from the context.

K continuations, V vocabulary."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.quality.arms import engine_of
from benchmarks.shared import Report, defaults, parse_options, start
from idlm.contracts import SamplingParams
from idlm.infer.clients.loads import load_prompts

DEFAULTS = defaults(
    "model= prompts=text answers=100 positions=4 continuations=256 max_tokens=256 temperature=1.0 drafts=3 "
    "device=cuda record=false"
)


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="ceiling")
    report = Report("ceiling", options)
    contexts = draw_contexts(options)
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype="auto").to(options["device"]).eval()
    found: dict[tuple[int, str], list[float]] = {}
    for context in contexts:
        for draft, p_KV in enumerate(conditionals(model, context, options), start=1):
            half = len(p_KV) // 2
            held_out = torch.minimum(p_KV[half:], p_KV[:half].mean(0)).sum(-1).mean()
            found.setdefault((draft, "fitted"), []).append(highest_acceptance(p_KV))
            found.setdefault((draft, "held_out"), []).append(float(held_out))
    for (draft, estimate), values in found.items():
        case = {"model": Path(options["model"]).name, "position": draft, "estimate": estimate}
        mean = torch.tensor(values).mean().item()
        report.add(case | {"temperature": float(options["temperature"])}, "acceptance_ceiling", mean, "")
    return 0


def draw_contexts(options: dict[str, str]) -> list[list[int]]:
    """Prompts with beginnings of answers that the model draws, cut at random positions."""
    temperature, max_tokens = float(options["temperature"]), int(options["max_tokens"])
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    with engine_of(options | {"batch": options["answers"], "dtype": "auto"}, "ar") as engine:
        prompts_ids = engine.encode(load_prompts(options["prompts"])[: int(options["answers"])])
        completions = engine.generate(prompts_ids, params)
        del engine
    rng = torch.Generator().manual_seed(0)
    contexts = []
    for prompt_ids, completion in zip(prompts_ids, completions, strict=True):
        answer = completion.token_ids
        cuts = torch.randperm(len(answer), generator=rng)[: int(options["positions"])]
        contexts += [[*prompt_ids, *answer[:cut]] for cut in cuts.tolist()]
    return contexts


@torch.inference_mode()
def conditionals(model: PreTrainedModel, context: list[int], options: dict[str, str]) -> list[Tensor]:
    """p(x_{1+j} | context, x_1 .. x_j) [K, V] fp32 for every draft j, of K drawn continuations."""
    temperature, device = float(options["temperature"]), model.device
    torch.manual_seed(len(context))
    out = model(torch.tensor([context], device=device), use_cache=True)
    p_KV = (out.logits[:, -1].float() / temperature).softmax(-1).expand(int(options["continuations"]), -1)
    cache = out.past_key_values
    cache.batch_repeat_interleave(len(p_KV))
    found = []
    for _ in range(int(options["drafts"])):
        out = model(torch.multinomial(p_KV, 1), past_key_values=cache, use_cache=True)
        p_KV = (out.logits[:, -1].float() / temperature).softmax(-1)
        found.append(p_KV)
    return found


def highest_acceptance(p_KV: Tensor) -> float:
    """max over q of the mean over k of sum_v min(p_KV[k, v], q[v]), q >= 0 with sum 1.

    In each v the mean is concave in q[v] with slope (number of k whose p exceeds q[v]) / K. So the steepest
    pieces are filled first, until q sums to 1."""
    p_VK = p_KV.T.contiguous().sort(dim=1).values
    pieces_K = p_VK.diff(dim=1, prepend=torch.zeros_like(p_VK[:, :1])).sum(dim=0, dtype=torch.float64)
    filled_K = pieces_K.cumsum(0).clamp(max=1.0).diff(prepend=pieces_K.new_zeros(1))
    slopes_K = torch.arange(len(p_KV), 0, -1, device=p_KV.device, dtype=torch.float64) / len(p_KV)
    return float((filled_K * slopes_K).sum())


if __name__ == "__main__":
    start(measure, __doc__)

"""The nearest known word to a misspelt one, for error messages; vocabularies here are small."""

from __future__ import annotations

from collections.abc import Iterable

ALIASES = {
    "adam_beta_2": ("train.adam_beta2",),
    "adapter_path": ("model",),
    "attn_implementation": ("model.attention", "attention"),
    "backend": ("attention",),
    "base_model": ("model.path", "base"),
    "batch_size": ("train.batch_size", "max_num_seqs"),
    "beta2": ("train.adam_beta2",),
    "bs": ("train.batch_size", "max_num_seqs"),
    "checkpoint": ("model.path", "model"),
    "checkpointing": ("model.gradient_checkpointing",),
    "clip_grad": ("train.max_grad_norm",),
    "context_length": ("train.max_length", "max_length"),
    "cutoff_len": ("train.max_length",),
    "dataset": ("data.path", "input"),
    "dataset_path": ("data.path", "input"),
    "enable_prefix_caching": ("prefix_cache",),
    "epochs": ("train.epochs",),
    "eval_steps": ("eval.every",),
    "global_batch_size": ("train.global_batch",),
    "grad_accum": ("train.accumulation",),
    "grad_clip": ("train.max_grad_norm",),
    "gradient_accumulation": ("train.accumulation",),
    "gradient_accumulation_steps": ("train.accumulation",),
    "input_file": ("input",),
    "instructions": ("system",),
    "kv_cache_dtype": ("kv_cache",),
    "limit": ("num",),
    "logging_steps": ("train.log_every",),
    "lora_alpha": ("adapter.alpha",),
    "lora_r": ("adapter.rank",),
    "lora_rank": ("adapter.rank",),
    "lr": ("train.learning_rate",),
    "max_batch_size": ("max_num_seqs",),
    "max_length": ("train.max_length",),
    "max_model_len": ("max_length",),
    "max_new_tokens": ("sampling.max_tokens",),
    "max_seq_len": ("train.max_length", "max_length"),
    "max_seq_length": ("train.max_length", "max_length"),
    "max_steps": ("train.steps",),
    "micro_batch_size": ("train.batch_size",),
    "model_name_or_path": ("model.path", "model"),
    "model_path": ("model.path", "model"),
    "n_samples": ("num",),
    "num_epochs": ("train.epochs",),
    "num_samples": ("num",),
    "num_train_epochs": ("train.epochs",),
    "out": ("output_dir", "output"),
    "output_file": ("output",),
    "output_path": ("output_dir", "output"),
    "per_device_train_batch_size": ("train.batch_size",),
    "quantization": ("weights",),
    "report_to": ("wandb.mode",),
    "resume_from_checkpoint": ("resume",),
    "save_dir": ("output_dir",),
    "save_steps": ("train.save_every",),
    "seq_len": ("train.max_length", "max_length"),
    "sequence_length": ("train.max_length", "max_length"),
    "sys": ("system",),
    "system_prompt": ("system",),
    "target_modules": ("adapter.targets",),
    "temp": ("sampling.temperature",),
    "tensor_parallel_size": ("tensor_parallel",),
    "tp": ("tensor_parallel",),
    "tp_size": ("tensor_parallel",),
    "train_file": ("data.path",),
    "warmup_ratio": ("train.warmup",),
    "wd": ("train.weight_decay",),
    "zero": ("train.zero_stage",),
}
"""Names that other trainers and engines give to our keys: the last segment of what a user writes, and the
keys that it may mean. The first one that a command has counts."""


RENAMED = {
    "accelerator": "accelerators",
    "max_prompt_rows": "max_num_batched_tokens",
    "on_rejection": "rejection_strategy",
    "run_ahead": "num_inflight_steps",
    "template": "chat_template",
}
"""Options that had another name in earlier versions: they are refused with the new one."""


def renamed(key: str) -> str | None:
    """The dotted key with the new names of its segments; None if none of them was renamed."""
    new = ".".join(RENAMED.get(segment, segment) for segment in key.split("."))
    return None if new == key else new


def edit_distance(a: str, b: str) -> int:
    """Insertions, deletions, substitutions and swaps of two neighbours that turn `a` into `b`."""
    before, row = [0] * (len(b) + 1), list(range(len(b) + 1))
    for i, char_a in enumerate(a, start=1):
        two_before, before, row = before, row, [i]
        for j, char_b in enumerate(b, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (char_a != char_b))
            if i > 1 and j > 1 and char_a == b[j - 2] and a[i - 2] == char_b:
                cost = min(cost, two_before[j - 2] + 1)
            row.append(cost)
    return row[-1]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The member of `known` with the fewest edits from `word`; None when nothing is even half alike.

    A word without a dot is also compared with the last segment of dotted keys, so that `temprature` finds
    `sampling.temperature`; the whole key wins ties.
    """
    best: tuple[float, str] | None = None
    for candidate in known:
        forms = [(candidate, 0.0)]
        if "." in candidate and "." not in word:
            forms.append((candidate.rpartition(".")[2], 0.5))
        for form, penalty in forms:
            length = max(len(word), len(form))
            limit = min(max(2.0, length / 2), length - 1, best[0] if best else length)
            if abs(len(word) - len(form)) + penalty > limit:
                continue
            distance = edit_distance(word, form) + penalty
            if distance <= limit and (best is None or (distance, candidate) < best):
                best = (distance, candidate)
    return None if best is None else best[1]


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The sentence part that follows an unknown word: its nearest neighbour, or nothing; nothing is near what
    is no text.
    """
    match = nearest(word, known) if isinstance(word, str) else None
    return "" if match is None else f"; did you mean {match!r}?"

"""Suggestions for unknown words in errors: other names of our keys, and the most similar known word."""

from __future__ import annotations

import difflib
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
keys that it may mean. The first one that a command has counts.
"""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the member of `known` that is most like `word`, or None if none is similar.

    A word without a dot is also compared with the last segment of dotted keys, so that `temprature` finds
    `sampling.temperature`; the whole key wins ties.
    """
    forms = {key.rpartition(".")[2] if "." not in word else key: key for key in known}
    forms |= {key: key for key in known}
    return next((forms[form] for form in difflib.get_close_matches(word, forms, n=1, cutoff=0.5)), None)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the sentence part that follows an unknown word: its nearest neighbour, or nothing."""
    match = nearest(word, known) if isinstance(word, str) else None
    return "" if match is None else f"; did you mean {match!r}?"

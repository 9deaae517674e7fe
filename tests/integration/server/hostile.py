"""Hostile artefacts: what a checkpoint of unknown origin may hold, for test_hostile_artefacts.py.

A case has a name, a function that plants it in a copy of a good checkpoint, and words of the refusal."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from idlm.files.tensors import INDEX_FILE, SINGLE_FILE

CANARY = "hostile_canary"
"""A module in the checkpoint; its import leaves a file."""
WEIGHT = "model.layers.0.mlp.up_proj.weight"
NOT_COUNTS = (-1, 2**62, math.nan, "4", [4])
NOT_NUMBERS = (0, math.nan, math.inf, [], 10**400)


class Artefact(NamedTuple):
    """`words` is a regular expression that the refusal matches."""

    name: str
    plant: Callable[[Path], None]
    words: str


def _write(path: Path, content: bytes) -> None:
    # The copy has links to the files of the good checkpoint.
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _config(words: str, file: str = "config.json", **changes: Any) -> Artefact:
    def plant(folder: Path) -> None:
        path = folder / file
        content = json.loads(path.read_text()) if path.exists() else {}
        _write(path, json.dumps(content | changes).encode())

    [(name, value)] = changes.items()
    return Artefact(f"{file} {name}={value!r:.40}", plant, words)


def _file(name: str, content: str | bytes, words: str, title: str = "") -> Artefact:
    def plant(folder: Path) -> None:
        _write(folder / name, content.encode() if isinstance(content, str) else content)

    return Artefact(title or f"{name} {content[:20]!r}", plant, words)


def configs() -> Iterator[Artefact]:
    """Wrong types, negative and enormous sizes, numbers that are none, code to import, nested bombs."""
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    for name in (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        for value in NOT_COUNTS:
            if (name, value) != ("max_position_embeddings", 2**62):
                yield _config(name if value != 2**62 else ".", **{name: value})
    yield from (_config("rms_norm_eps", rms_norm_eps=value) for value in NOT_NUMBERS)
    for value in NOT_NUMBERS:
        yield _config("rope_theta", rope_parameters={"rope_type": "default", "rope_theta": value})
    for parameters in (5, [], "yarn", {"rope_type": "os.system"}, {"rope_type": ["default"]}):
        yield _config("rope", rope_parameters=parameters)
    for value in ("os.system", ["os.system"], [], ["Qwen3ForCausalLM"] * 2, {"a": 1}, [None]):
        yield _config("architectures", architectures=value)
    for value in ("os.system", ["float32"], "torch.float32", "int8"):
        yield _config("dtype", dtype=value)
    for value in ("gelu", ["silu"], "hostile_canary.act"):
        yield _config("hidden_act", hidden_act=value)
    for value in (5, ["sliding_attention"] * 2, {"0": "full_attention"}):
        yield _config("layer_types", layer_types=value)
    for value in ("yes", 1):
        yield _config("tie_word_embeddings", tie_word_embeddings=value)
    for value in ({"quant_method": CANARY}, "int4", 5):
        yield _config("quantization_config", quantization_config=value)
    for value in ([[1]], "x", True, 9.0, -1):
        yield _config("eos_token_id", "generation_config.json", eos_token_id=value)
    for text in (
        "",
        "[]",
        "{]",
        "[" * 100_000,
        '{"hidden_size": ' + "9" * 5000 + "}",
    ):
        yield _file("config.json", text, "config.json", f"config.json {text[:8]}... {len(text)}")
    for content in (b"\xff\xfe", b"\x80\x04\x95"):
        yield _file("config.json", content, "config.json")


def semantics() -> Iterator[Artefact]:
    """idlm_config.json."""
    file = "idlm_config.json"
    for name, values in {
        "causality": ("os.system", 5, [], True),
        "stride": (0, 2**70, "4", 1.5, True, math.nan),
        "block_size": (0, [4], 1.5),
        "mask_token_id": (-1, "3", True),
        "logit_shift": ("no", 1),
        "stop_token_ids": ("x", 5, [-1], [1.5]),
    }.items():
        good = {"causality": "causal", "logit_shift": True, "mask_token_id": 3, "stride": 2}
        for value in values:
            yield _file(file, json.dumps(good | {name: value}), name, f"{file} {name}={value!r}")
    for text in ("", "[]", "[" * 100_000, '{"stride": ' + "9" * 5000 + "}"):
        yield _file(file, text, file, f"{file} {text[:8]}... {len(text)}")


def _stored(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _tensor(shape: Any = (2, 2), offsets: Any = (0, 16), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def weights() -> Iterator[Artefact]:
    """Headers that lie, and tensors of other types and shapes."""
    data = bytes(16)
    for title, content in {
        "empty": b"",
        "header of 2^63 bytes": _stored({}, length=2**63),
        "header beyond the file": _stored({}, length=10_000),
        "header of 101 MB": _stored({}, length=101_000_000),
        "header of no bytes": _stored(b""),
        "no JSON": _stored(b"{nonsense}"),
        "nested header": _stored(b"[" * 100_000 + b"]" * 100_000),
        "pickle": b"\x80\x04\x95" + bytes(100),
        "no data": _stored({WEIGHT: _tensor()}),
        "half of the data": _stored({WEIGHT: _tensor()}, data[:8]),
        "more data": _stored({WEIGHT: _tensor()}, data * 2),
        "overlap": _stored({"a": _tensor(), "b": _tensor()}, data),
        "hole": _stored({"a": _tensor(), "b": _tensor(offsets=(32, 48))}, data * 3),
        "offsets that go back": _stored({"a": _tensor(offsets=(16, 0))}, data),
        "offsets beyond the end": _stored({"a": _tensor(offsets=(0, 2**62))}, data),
        "shape of 2^62": _stored({"a": _tensor(shape=[2**62, 2**62])}, data),
        "negative shape": _stored({"a": _tensor(shape=[-2, -2])}, data),
        "shape of text": _stored({"a": _tensor(shape="2,2")}, data),
        "another size": _stored({"a": _tensor(shape=[3, 3])}, data),
        "unknown type": _stored({"a": _tensor(dtype="PICKLE")}, data),
        "the same name twice": _stored(b'{"a": %s, "a": %s}' % ((json.dumps(_tensor()).encode(),) * 2), data),
        "metadata that is no text": _stored({"__metadata__": {"a": 5}, "a": _tensor()}, data),
        "only metadata": _stored({"__metadata__": {"format": "pt"}}),
    }.items():
        yield _file(SINGLE_FILE, content, "safetensors|tensors", f"weights: {title}")
    for title, change in {
        "truncated": lambda whole: whole[: len(whole) // 2],
        "longer": lambda whole: whole + b"\x00",
        "one byte short": lambda whole: whole[:-1],
    }.items():
        yield Artefact(f"weights: {title}", _changed_bytes(change), "safetensors")
    for title, replaced in {
        "int8": torch.zeros(4, 4, dtype=torch.int8),
        "scalar": torch.zeros(()),
        "another shape": torch.zeros(3, 5),
        "another number of axes": torch.zeros(1, 4, 4),
        "missing": None,
    }.items():
        yield Artefact(f"weights: tensor {title}", _replaced(replaced), WEIGHT)


def _changed_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        path = folder / SINGLE_FILE
        _write(path, change(path.read_bytes()))

    return plant


def _replaced(tensor: torch.Tensor | None) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        stored = load_file(folder / SINGLE_FILE)
        stored.pop(WEIGHT)
        (folder / SINGLE_FILE).unlink()
        save_file(stored if tensor is None else {**stored, WEIGHT: tensor}, folder / SINGLE_FILE)

    return plant


def files() -> Iterator[Artefact]:
    """Index files, pickles, manifests and links."""
    names = ("../x.safetensors", "/etc/passwd", "..", "", "x.safetensors\0.bin", "~/x.safetensors")
    for value in (*names, 5, ["x.safetensors"]):
        yield _index({"weight_map": {WEIGHT: value}}, "index|weight files")
    for content in ({}, {"weight_map": {}}, {"weight_map": []}):
        yield _index(content, "weight_map")
    yield _index("[" * 100_000, "index")
    yield _index({"weight_map": {WEIGHT: "gone.safetensors"}}, "gone.safetensors")
    for name in ("pytorch_model.bin", "model.pt", "model.ckpt"):
        yield Artefact(f"only {name}", _pickle_only(name), "safetensors")
    for title, files in {
        "outside": {"../x": {"sha256": "0" * 64, "size": 1}},
        "absolute": {"/etc/passwd": {"sha256": "0" * 64, "size": 1}},
        "missing": {"gone": {"sha256": "0" * 64, "size": 1}},
        "no entry": {"config.json": 5},
        "a list": [],
        "other bytes": {"config.json": {"sha256": "0" * 64, "size": 1}},
        "a NUL": {"a\0b": {"sha256": "0" * 64, "size": 1}},
    }.items():
        manifest = json.dumps({"format": "idlm-manifest-1", "files": files, "digest": ""})
        yield _file("manifest.json", manifest, "manifest|published", f"manifest: {title}")
    for name in ("config.json", SINGLE_FILE):
        yield Artefact(f"{name} is a folder", _special(name, os.mkdir), name.partition(".")[0])
        yield Artefact(f"{name} links to itself", _special(name, lambda path: path.symlink_to(path)), ".")
    for name in ("config.json", SINGLE_FILE, "generation_config.json", "manifest.json"):
        yield Artefact(f"{name} is a pipe", _special(name, os.mkfifo), ".")
        yield Artefact(
            f"{name} links to /dev/zero", _special(name, lambda path: path.symlink_to("/dev/zero")), "."
        )


def _index(content: Any, words: str) -> Artefact:
    text = content if isinstance(content, str) else json.dumps(content)

    def plant(folder: Path) -> None:
        (folder / SINGLE_FILE).unlink()
        (folder / INDEX_FILE).write_text(text)

    return Artefact(f"index {text[:60]}", plant, words)


def _pickle_only(name: str) -> Callable[[Path], None]:
    # Protocol 0: import os.system and call it.
    program = f"cos\nsystem\n(S'touch {CANARY}'\ntR.".encode()

    def plant(folder: Path) -> None:
        (folder / SINGLE_FILE).unlink()
        (folder / name).write_bytes(program)

    return plant


def _special(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return plant


def artefacts() -> list[Artefact]:
    """All checkpoints."""
    return [*configs(), *semantics(), *weights(), *files()]


TEMPLATES = {
    "class of a text": "{{ ''.__class__.__base__ }}",
    "attribute by filter": "{{ (''|attr('__class__')).__base__ }}",
    "globals of a function": "{{ raise_exception.__globals__.os }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.system('touch hostile_canary') }}",
    "self's context": "{{ self._TemplateReference__context.environment }}",
    "format": "{{ '{0.__class__.__base__}'.format('') }}",
    "dunder by join": "{{ (''|attr(['__cl', 'ass__']|join)).__base__ }}",
    "frames of a generator": "{{ ([]|map('upper')).gi_frame.f_globals }}",
    "import": "{% import 'os' as os %}",
    "append to messages": "{{ messages.append(messages) }}",
    "update of a message": "{{ messages[0].update({'a': 1}) }}",
    "open": "{{ open('hostile_canary', 'w') }}",
    "broken": "{{ ",
    "deep expression": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "long text": "{{ 'a' * 10**10 }}",
    "doubled": "{% set n = namespace(s='a') %}{% for i in range(50) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "much output": "{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
}
"""Chat templates; none of them renders."""


def tokenizers() -> Iterator[Artefact]:
    """Tokenizer files beside the bundled tokenizer."""
    words = "tokenizer"
    for text in (
        "",
        "[]",
        "{}",
        '{"model": 5}',
        '{"model": {"type": "os.system"}}',
        "[" * 100_000,
    ):
        yield _file("tokenizer.json", text, words, f"tokenizer.json {text[:30]} {len(text)}")
    for name, value in {
        "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []},
        "added_tokens": [{"id": 2**40, "content": "a", "special": True}],
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "(("},
            "behavior": "Isolated",
            "invert": False,
        },
        "normalizer": {"type": CANARY},
        "decoder": 5,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "gone", "type_id": 0}}],
        },
    }.items():
        yield _config(words, "tokenizer.json", **{name: value})
    for text in ("", "[]", "[" * 100_000):
        yield _file("tokenizer_config.json", text, words, f"tokenizer_config.json {text[:30]} {len(text)}")
    for value in (5, ["a"]):
        yield _config(words, "tokenizer_config.json", tokenizer_class=value)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        yield Artefact(f"{name} is a folder", _special(name, os.mkdir), words)
        yield Artefact(f"{name} is a pipe", _special(name, os.mkfifo), words)
        yield Artefact(
            f"{name} links to /dev/zero", _special(name, lambda path: path.symlink_to("/dev/zero")), words
        )


CODE = {
    "config.json": ("auto_map", "model_type", "_attn_implementation", "transformers_weights"),
    "generation_config.json": ("custom_generate", "auto_map", "_target_"),
    "tokenizer_config.json": ("auto_map", "tokenizer_class", "processor_class", "_target_"),
    "tokenizer.json": ("auto_map", "_target_"),
}
"""Keys that name code elsewhere; some are ignored and some are refused, and none is followed."""
AUTO_CLASSES = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")


def names_of_code() -> Iterator[Artefact]:
    """Keys that ask for the checkpoint's module."""
    for file, names in CODE.items():
        for name in names:
            for value in (f"{CANARY}.Config", dict.fromkeys(AUTO_CLASSES, f"{CANARY}.Config")):
                yield _config(".", file, **{name: value})

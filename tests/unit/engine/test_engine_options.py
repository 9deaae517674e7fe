"""Options of an engine: refusals by code and words, and defaults that follow device and checkpoint."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.infer import build
from idlm.infer.decoders.base import TOKEN_BY_TOKEN, KVWritePolicy
from idlm.infer.engine import Engine
from idlm.infer.settings import EngineSettings, check_options
from idlm.semantics import FILE_NAME, Semantics
from tests.errors import refused
from tests.toy import write_toy_checkpoint

MASK_ID, VOCAB = 47, 48
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_length": 64}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_toy_checkpoint(tmp_path_factory.mktemp("toy"))
    Semantics(mask_token_id=MASK_ID, stride=4).save(directory)
    return directory


@pytest.mark.parametrize(
    ("code", "decoder", "options", "words"),
    [
        ("IDLM-0102", "idsd", {}, ("'isd'",)),
        ("IDLM-0102", "isd", {"rejection_strategy": "three"}, ("'tree'", "cold")),
        ("IDLM-0416", "isd", {"strid": 4}, ("stride",)),
        ("IDLM-0416", "isd", {"max_num_seq": 4}, ("max_num_seqs",)),
        ("IDLM-0416", "ar", {"stride": 4}, ("stride",)),
        ("IDLM-0416", "isd", {"acceptance": "sloppy"}, ("exact", "published")),
        ("IDLM-0402", "isd", {"stride": 0}, ("stride=0",)),
        ("IDLM-0415", "ar", {"num_pages": 0}, ("num_pages=0",)),
        ("IDLM-0415", "ar", {"max_num_seqs": 0}, ("max_num_seqs=0",)),
        (
            "IDLM-0415",
            "ar",
            {"page_size": 0, "max_num_batched_tokens": 0},
            ("page_size=0", "max_num_batched_tokens=0"),
        ),
        ("IDLM-0415", "ar", {"chat_template": "chat"}, ("chat_template",)),
        (
            "IDLM-0415",
            "ar",
            {"max_num_seqs": True, "num_pages": True},
            ("max_num_seqs: got True", "num_pages: got True"),
        ),
        ("IDLM-0415", "ar", {"device": None, "dtype": None}, ("device: got null", "dtype: got null", "text")),
        (
            "IDLM-0415",
            "ar",
            {"attention": None, "memory": ["caching"]},
            ("attention: got null", "memory: got ['caching']"),
        ),
        ("IDLM-0102", 5, {}, ("decoder 5",)),
        ("IDLM-0102", ["ar"], {}, ("decoder ['ar']",)),
        ("IDLM-0417", "ar", {"device": "tpu9"}, ("tpu9",)),
        ("IDLM-0417", "ar", {"device": "mps"}, ("mps",)),
        ("IDLM-0417", "ar", {"device": "meta"}, ("meta",)),
        ("IDLM-0417", "ar", {"device": "xpu:0"}, ("xpu",)),
        ("IDLM-0608", "ar", {"dtype": "float31"}, ("float31", "bfloat16")),
        ("IDLM-0420", "ar", {"max_length": 100_000}, ("100000", "512")),
        ("IDLM-0102", "ar", {"memory": "cacheing"}, ("'caching'",)),
        ("IDLM-0606", "isd", {"mask_token_id": VOCAB}, (str(VOCAB),)),
    ],
)
def test_bad_engine_options_are_refused(
    checkpoint: Path, code: str, decoder: str, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    error = refused(code, Engine.from_pretrained, checkpoint, decoder, **{**OPTIONS, **options})
    assert all(word in str(error) for word in words), str(error)


def test_isd_without_a_mask_id_is_refused(tmp_path: Path) -> None:
    plain = write_toy_checkpoint(tmp_path / "plain")
    refused("IDLM-0404", Engine.from_pretrained, plain, "isd", stride=2, **OPTIONS)
    assert Engine.from_pretrained(plain, **OPTIONS).decoder.name == "ar"
    with pytest.warns(UserWarning, match="trained for.*not converted"):
        Engine.from_pretrained(plain, "isd", stride=2, mask_token_id=MASK_ID, **OPTIONS)
    with pytest.warns(
        UserWarning, match="one token per forward pass, like ar: this checkpoint is not converted"
    ):
        Engine.from_pretrained(plain, "isd", **OPTIONS)


def test_a_stride_beyond_the_checkpoint_warns_and_within_does_not(checkpoint: Path) -> None:
    with pytest.warns(UserWarning, match="stride 5 is larger than the 4"):
        Engine.from_pretrained(checkpoint, "isd", stride=5, **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Engine.from_pretrained(checkpoint, "isd", stride=3, **OPTIONS).decoder.num_masks == 2


def test_a_pool_too_small_names_what_is_needed(checkpoint: Path) -> None:
    engine = Engine.from_pretrained(checkpoint, "ar", num_pages=2, page_size=4, **OPTIONS)
    error = refused("IDLM-0413", engine.generate, [[1, 2, 3]], SamplingParams(max_tokens=20))
    assert "8" in error.message
    assert "num_pages" in error.fix


def test_numbers_of_numpy_are_numbers() -> None:
    ids, options = np.array([1, 2]), {"steps": np.int64(2)}
    params = SamplingParams(max_tokens=np.int64(5), stop_token_ids=ids, decoder_options=options)  # type: ignore[arg-type]
    assert (params.max_tokens, params.stop_token_ids, params.decoder_options) == (5, (1, 2), {"steps": 2})
    checked = check_options("isd", {"num_pages": np.int64(20), "stride": np.uint8(3)})
    assert (checked.settings.num_pages, checked.decoder_options["stride"]) == (20, 3)


GPU, CPU = torch.device("cuda"), torch.device("cpu")
BLOCKS = KVWritePolicy(kind="block", block_size=32)


@pytest.mark.parametrize(
    ("device", "gib", "policy", "expected"),
    [
        (GPU, 141, TOKEN_BY_TOKEN, (256, 8192)),
        (GPU, 80, TOKEN_BY_TOKEN, (256, 8192)),
        (GPU, 40, TOKEN_BY_TOKEN, (128, 4096)),
        (GPU, 16, TOKEN_BY_TOKEN, (64, 2048)),
        (GPU, 141, BLOCKS, (64, 1024)),
        (CPU, 512, TOKEN_BY_TOKEN, (64, 1024)),
    ],
)
def test_sequences_and_prompt_rows_follow_the_memory(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    gib: int,
    policy: KVWritePolicy,
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(build, "memory_bytes", lambda _: (gib << 30, gib << 30))
    found = build._with_loads(EngineSettings(warmup="auto"), device, policy)
    assert (found.max_sequences, found.row_budget) == expected
    cold = build._with_loads(EngineSettings(), device, policy)
    assert (cold.max_sequences, cold.row_budget) == build.OTHER_LOAD
    given = build._with_loads(EngineSettings(max_num_seqs=3, max_num_batched_tokens=5), device, policy)
    assert (given.max_sequences, given.row_budget) == (3, 5)


def test_acceptance_of_a_checkpoint_is_read_and_only_written_where_it_is_known(tmp_path: Path) -> None:
    Semantics(mask_token_id=7, stride=3).save(tmp_path)
    assert "acceptance" not in json.loads((tmp_path / FILE_NAME).read_text())
    known = Semantics(mask_token_id=7, stride=3, acceptance=(0.9, 0.8))
    known.save(tmp_path)
    assert Semantics.load(tmp_path) == known


@pytest.mark.parametrize("value", [0.9, [1.5], ["0.9"], {"0": 1}])
def test_other_values_of_acceptance_are_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps({"mask_token_id": 7, "stride": 3, "acceptance": value}))
    refused("IDLM-0304", Semantics.load, tmp_path)

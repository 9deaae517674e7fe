"""Which token becomes the mask of a base, the reason that is printed, and the rows that are added for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from idlm.text.tokenizer import load_tokenizer, num_token_ids
from idlm.train.model.checks import grow_vocabulary, mask_token, mask_token_text

TINY = Path(__file__).resolve().parents[3] / "recipes" / "assets" / "tiny_ar"


@pytest.mark.parametrize(
    ("spare_rows", "added", "explicit", "words"),
    [
        (3, "<repo_name>", None, "the first spare row"),
        (0, "<repo_name>", None, "no row is spare, so the unused special token '<repo_name>'"),
        (0, "<repo_name>", -1, "model.mask_token_id, '<repo_name>'"),
        (2, "<own>", 1, "model.mask_token_id, a spare row"),
        (0, "<own>", None, "no special token unused, so {} rows are added, which start at the mean"),
    ],
)
def test_the_choice_and_its_reason(spare_rows, added, explicit, words) -> None:
    """`explicit` counts from the first id after the tokenizer's."""
    tokenizer = load_tokenizer(TINY)
    tokenizer.add_tokens([added], special_tokens=True)
    num_ids = num_token_ids(tokenizer)
    given, num_rows = None if explicit is None else num_ids + explicit, num_ids + spare_rows
    mask_token_id, has_row = mask_token(tokenizer, num_rows, given)
    told = mask_token_text(tokenizer, num_rows, given, has_adapter=False)
    assert told.startswith(f"mask token {mask_token_id}: ")
    assert words.format(64 - num_rows % 64) in told
    assert has_row == (mask_token_id < num_rows)


@pytest.mark.parametrize("is_tied", [False, True])
def test_rows_that_are_added_start_at_the_mean(is_tied) -> None:
    shape = LlamaConfig(
        vocab_size=70, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=is_tied,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape)
    before_VD = model.get_input_embeddings().weight.detach().clone()
    grow_vocabulary(model, 70)
    table_VD = model.get_input_embeddings().weight.detach()
    assert table_VD.shape == (128, 16) and model.config.vocab_size == 128
    assert torch.equal(table_VD[:70], before_VD)
    torch.testing.assert_close(table_VD[70], before_VD.mean(dim=0), atol=1e-3, rtol=0)
    assert len(model.get_output_embeddings().weight) == 128

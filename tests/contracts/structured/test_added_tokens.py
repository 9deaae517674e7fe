"""Grammars and added tokens of the form `<...>`: those that answers show are text, special or not; those that
they do not show are never text, but a grammar can name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from idlm.contracts import Constraint, ConstraintKind
from idlm.infer.server.parsers import calls_grammar
from idlm.infer.structured.grammar import WORD_BITS, GrammarCompiler, compute_bits
from idlm.text.calls import FORMATS
from idlm.text.detokenizer import answer_text
from idlm.text.tokenizer import load_tokenizer
from tests.small_tokenizers import save_byte_fallback, save_tagged

VOCAB = 272
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>'
HERMES = FORMATS["hermes"]
TOOLS: dict[str, Any] = {"f": {"type": "object"}}
MATCHES: list[tuple[ConstraintKind, str, str]] = [
    ("choice", '["<tool_call>", "a</think>"]', "a</think>"),
    ("choice", '["<tool_call>"]', "<tool_call>"),
    ("regex", "<think>(.|\n)*</think>yes", "<think>why\n</think>yes"),
    ("json_schema", '{"enum": ["<think>", "<|fim_pad|>x"]}', '"<|fim_pad|>x"'),
    ("json_object", "", '{"a": "<think>"}'),
    ("grammar", r'start: <think> /[<a-z]*\// </think> "<think>" // <think>', "<think>why</</think><think>"),
    ("grammar", calls_grammar(HERMES, TOOLS, is_forced=True, has_many=True), f"{CALL}\n{CALL}"),
    (
        "grammar",
        calls_grammar(HERMES, TOOLS, is_forced=False, has_many=True),
        f"<think>\nwhy</think>\n{CALL}",
    ),
    ("grammar", calls_grammar(HERMES, TOOLS, is_forced=False, has_many=False), "<think></think>no call"),
]


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def compiler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = load_tokenizer(save_tagged(tmp_path_factory.mktemp("tags"), special=request.param))
    return GrammarCompiler(tokenizer, VOCAB, [tokenizer.eos_token_id])


def takes(compiler: GrammarCompiler, kind: ConstraintKind, text: str, token_ids: list[int]) -> bool:
    matcher = compiler.grammar(Constraint(kind=kind, text=text)).matcher
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


@pytest.mark.parametrize(("kind", "text", "answer"), MATCHES)
def test_tags_are_text(compiler: GrammarCompiler, kind: ConstraintKind, text: str, answer: str) -> None:
    token_ids = compiler._tokenizer.encode(answer, add_special_tokens=False)
    assert answer_text(compiler._tokenizer, token_ids) == answer
    assert takes(compiler, kind, text, token_ids)


@pytest.mark.parametrize(
    "text",
    [
        '?start: name\n?name: "a::=b" // x ::= y',
        '%import common.INT\n!start: name | INT\nname: "a" /::=b/',
        'root ::= name # ?start: x\nname ::= "a" "::=" [b]',
    ],
)
def test_both_notations_of_grammars_are_known(compiler: GrammarCompiler, text: str) -> None:
    token_ids = compiler._tokenizer.encode("a::=b", add_special_tokens=False)
    assert takes(compiler, "grammar", text, token_ids)


def test_what_a_grammar_forces_fits_it(compiler: GrammarCompiler) -> None:
    for forced in ("<tool_call>x", "a<|im_end|><|fim_pad|>", "<|im_start|>"):
        matcher = compiler.grammar(Constraint(kind="choice", text=json.dumps([forced]))).matcher
        token_ids = matcher.compute_ff_tokens()
        assert answer_text(compiler._tokenizer, token_ids) == forced
        assert matcher.consume_tokens(token_ids) and matcher.is_accepting()


def test_hidden_tokens_are_no_text_but_have_names(compiler: GrammarCompiler) -> None:
    token_ids = compiler._tokenizer.encode("a<|im_start|>", add_special_tokens=False)
    assert len(token_ids) == 2
    assert not takes(compiler, "regex", "a<\\|im_start\\|>", token_ids)
    assert takes(compiler, "grammar", 'start: "a" <|im_start|>', token_ids)


def test_named_tokens_can_be_tested_as_drafts(compiler: GrammarCompiler) -> None:
    """Ids without text follow nowhere."""
    names, end = ["<think>", "x", "</think>", "y"], compiler._tokenizer.eos_token_id
    token_ids = compiler._tokenizer.convert_tokens_to_ids(names)
    bits_YW = torch.zeros(len(token_ids) + 1, -(-VOCAB // WORD_BITS), dtype=torch.int32)
    for text in ('start: <think> "x" </think> "y"', f'start: <[{token_ids[0]}]> "x" </think> "y"'):
        grammar = compiler.grammar(Constraint(kind="grammar", text=text))
        for num_tested in range(3):
            grammar.matcher.compute_ff_tokens()
            assert grammar.matcher.try_consume_tokens(token_ids[:num_tested]) == num_tested
            assert grammar.matcher.rollback(num_tested)
            compute_bits([(grammar, token_ids, 0)], bits_YW)
            allowed = np.unpackbits(bits_YW.numpy().view(np.uint8), axis=1, bitorder="little")
            assert [row.nonzero()[0].tolist() for row in allowed] == [[each] for each in (*token_ids, end)]


def test_calls_may_be_spelled_in_the_models_way(tmp_path: Path) -> None:
    """One token may begin within text that is forced and end behind it."""
    words = ['\n{"name": "f", "arguments": {"a": 1}}\n']
    tokenizer = load_tokenizer(save_tagged(tmp_path, words=words))
    token_ids = tokenizer.encode(f"<tool_call>{words[0]}</tool_call>", add_special_tokens=False)
    assert len(token_ids) == 3
    text = calls_grammar(HERMES, TOOLS, is_forced=False, has_many=False)
    assert takes(GrammarCompiler(tokenizer, VOCAB, [258]), "grammar", text, token_ids)


def test_forced_text_begins_without_a_space(tmp_path: Path) -> None:
    """The tokenizer puts one in front of every text."""
    tokenizer = load_tokenizer(save_byte_fallback(tmp_path))
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    matcher = compiler.grammar(Constraint(kind="regex", text="abc the é(x|y)")).matcher
    assert matcher.consume_tokens(matcher.compute_ff_tokens())
    assert matcher.compute_ff_bytes() == b""

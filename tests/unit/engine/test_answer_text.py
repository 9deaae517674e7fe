"""Text of answers: the same streamed or whole, ended by stop ids and stop strings, which a search of the
whole text finds."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine
from idlm.semantics import Semantics
from idlm.tasks.tokenizer import save_tokenizer
from idlm.text.detokenizer import AnswerText, Detokenizer
from idlm.text.thoughts import ThoughtReader
from idlm.text.tokenizer import load_tokenizer
from tests.small_tokenizers import save_byte_fallback, save_tagged
from tests.toy import write_toy_checkpoint
from tests.unit.task_encoder import num_embedding_rows

ALPHABET = "abc"
HIDDEN = {3: "<x>", 4: "<yy>", 5: "<x><"}


class _Letters(Detokenizer):
    """Token ids are letters, or no text."""

    def __init__(self, alphabet: str = ALPHABET) -> None:
        """Without a tokenizer."""
        self._alphabet = alphabet

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(self._alphabet[idx] for idx in token_ids if idx < len(self._alphabet))

    def flush(self) -> str:
        return ""


def _cut(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the first stop string in it; None if it has none."""
    return min((text[: text.index(stop)] for stop in stops if stop in text), key=len, default=None)


@pytest.mark.parametrize("seed", range(4))
def test_text_ends_before_the_first_stop_and_is_never_taken_back(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        stops = tuple("".join(rng.choices(ALPHABET, k=rng.randint(1, 5))) for _ in range(rng.randint(0, 4)))
        answer, text, released = AnswerText(_Letters(), stops), "", ""
        for _ in range(20):
            piece = [rng.randrange(3) for _ in range(rng.randint(0, 3))]
            text += _Letters().push(piece)
            released += answer.push(piece)
            expected = _cut(text, stops)
            assert answer.is_stopped == (expected is not None)
            if expected is not None:
                assert released == answer.text == expected
                break
            held = text.removeprefix(released)
            assert not held or any(stop.startswith(held) for stop in stops), "held back for nothing"
        released += answer.finish()
        assert released == answer.text == (text if not answer.is_stopped else _cut(text, stops))


@pytest.mark.parametrize("seed", range(2))
def test_stops_name_tokens_that_are_not_shown(seed: int) -> None:
    """Against a search in text where each named token is one letter more, which is left out at the end."""
    rng, letters = random.Random(seed), {"<x><": "Z", "<x>": "X", "<yy>": "Y"}
    for _ in range(200):
        parts = [*ALPHABET, *letters]
        stops = tuple("".join(rng.choices(parts, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3)))
        # At each position the longest name, as tokenizers read it.
        marked = [re.sub("<x><|<x>|<yy>", lambda found: letters[found[0]], stop) for stop in stops]
        named = {idx: letters[name] for idx, name in HIDDEN.items() if any(name in each for each in stops)}
        answer, whole, released = AnswerText(_Letters(), stops, hidden=HIDDEN), "", ""
        for _ in range(20):
            token_id = rng.randrange(6)
            whole += named.get(token_id) or _Letters().push([token_id])
            released += answer.push([token_id])
            shown = whole.translate(str.maketrans("", "", "XYZ"))
            cuts = [_cut(shown, stops), _cut(whole, tuple(marked))]
            found = [cut.translate(str.maketrans("", "", "XYZ")) for cut in cuts if cut is not None]
            assert answer.is_stopped == bool(found), (stops, whole)
            if found:
                assert released == answer.text == min(found, key=len)
                break
            assert shown.startswith(released)
        assert released + answer.finish() == answer.text == (released if answer.is_stopped else shown)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>a\n\nbS</think>\n\nc\n\nd", False, "<think>a\n\nbS</think>\n\nc"),
        (" \n<think>S", False, " \n<think>S"),
        ("<thiS", False, "<thi"),
        ("<think>", False, "<think>"),
        ("<think></think>S", False, "<think></think>"),
        ("a<think>S</think>", False, "a<think>"),
        ("S</thinkS</think>aS", True, "S</thinkS</think>a"),
        ("</think>\n\n\nS", True, "</think>\n\n\n"),
        ("\n\n", False, ""),
    ],
)
def test_stops_do_not_act_in_reasoning(text: str, is_open: bool, expected: str) -> None:
    alphabet = "".join(sorted(set(text)))
    for size in range(1, len(text) + 1):
        answer = AnswerText(_Letters(alphabet), ("S", "\n\n"), reasoning=ThoughtReader(is_open=is_open))
        ids = [alphabet.index(char) for char in text]
        pieces = [answer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
        assert "".join([*pieces, answer.finish()]) == answer.text == expected
        assert answer.is_stopped == (expected != text)


@pytest.mark.parametrize("special", [False, True])
def test_which_stops_act_for_a_checkpoint(tmp_path: Path, special: bool) -> None:
    tokenizer = load_tokenizer(save_tagged(tmp_path, special=special))

    def text_of(answer: str, prompt: str = "a", **settings: Any) -> str:
        params = SamplingParams(stop=("b", "<|im_end|>c", "</tool_call>"), **settings)
        found = AnswerText.of(tokenizer, tokenizer.encode(prompt), params)
        return found.push(tokenizer.encode(answer)) + found.finish()

    assert text_of("a<|im_end|>") + text_of("a<|im_end|>c") + text_of("ac</tool_call>") == "aaac"
    ended = AnswerText.of(tokenizer, [1], SamplingParams(stop=("b", "</think>\n")))
    pieces = [ended.push([token_id]) for token_id in tokenizer.encode("<think>ab</thc</think>\nd")]
    assert "".join(pieces) == "<think>ab</thc" and ended.is_stopped
    # The template has the tags.
    assert text_of("<think>b</think>aba") == "<think>b</think>a"
    assert text_of("b</think>aba", "<think>\n") == "b</think>a"
    assert text_of("<think>b</think>", stop_in_reasoning=True) == "<think>"
    tokenizer.chat_template = "{{ messages }}"
    assert text_of("<think>b</think>") == "<think>"
    assert text_of("<think>b</think>aba", stop_in_reasoning=False) == "<think>b</think>a"


OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_length": 128}
NUM_FALLBACK_ROWS = 288
"""Some of these rows have no token."""


@pytest.fixture(scope="module")
def byte_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A random model, so that most of its bytes are not valid UTF-8."""
    directory = save_byte_fallback(tmp_path_factory.mktemp("bytes"))
    write_toy_checkpoint(directory, vocab_size=NUM_FALLBACK_ROWS, sharpness=0.5)
    Semantics(mask_token_id=NUM_FALLBACK_ROWS - 1, stride=3).save(directory)
    return Engine.from_pretrained(directory, **OPTIONS)


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_has_one_text(byte_engine: Engine, seed: int) -> None:
    """Streamed, whole, and searched for stop strings, although many bytes are not valid UTF-8."""
    params = SamplingParams(max_tokens=80, seed=seed)
    [whole] = byte_engine.generate(["the"], params)
    [searched] = byte_engine.generate(["the"], replace(params, stop=("never there",)))
    events = list(byte_engine.stream("the", params))
    assert whole.token_ids == searched.token_ids == tuple(t for event in events for t in event.token_ids)
    assert "\ufffd" in whole.text
    assert whole.text == searched.text == "".join(event.text for event in events)


@pytest.mark.parametrize("given", [5, [5, 7]])
def test_answers_end_where_transformers_and_the_tokenizer_end_them(tmp_path: Path, given: Any) -> None:
    """Without generation_config.json, transformers takes eos_token_id of config.json."""
    import transformers

    num_ids = save_tokenizer(tmp_path)
    write_toy_checkpoint(tmp_path, vocab_size=num_embedding_rows(num_ids))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": given}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id
    engine = Engine.from_pretrained(tmp_path, **OPTIONS)
    assert theirs == given
    assert set(engine._parts.eos_ids) == {5, *([7] if given == [5, 7] else []), engine.tokenizer.eos_token_id}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert Engine.from_pretrained(tmp_path, **OPTIONS)._parts.eos_ids == (engine.tokenizer.eos_token_id, 9)

"""Which of several chat templates is used, the date that it writes, and the bos and eos of samples."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from idlm.config.compose import compose
from idlm.errors import UserError
from idlm.text.chat import NO_END
from idlm.text.templates import render, with_date, writes_date
from idlm.text.tokenizer import encode_messages, encode_prompt, load_tokenizer
from idlm.train.check import data_problems
from idlm.train.checkpoint.resume import RUN_FOLDER
from idlm.train.config.data import DataConfig
from idlm.train.config.schema import TrainConfig
from idlm.train.data.base import SOURCES, make_encoder
from idlm.train.data.encoder import RETOKENISED, Encoder
from idlm.train.prepare import DATA_FILE, remember_data, run_date
from tests.errors import refused
from tests.small_tokenizers import save_byte_fallback, save_byte_level
from tests.unit.conversations import render_conversation
from tests.unit.data.template_forms import FORMS, NOT_CLOSED, form_tokenizer, save_tokenizer, tokenizer_with

NAMED = "{% for m in messages %}NAME {{ m.content }}<|im_end|>{% endfor %}"
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
DAY, NEXT = datetime.date(2025, 1, 31), datetime.date(2025, 2, 1)


def tokenizer_of(folder: Path, template: Any, files: dict[str, str] | None = None) -> Any:
    folder.mkdir(exist_ok=True)
    save_byte_level(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template")
    path.write_text(json.dumps(config | ({} if template is None else {"chat_template": template})))
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return load_tokenizer(folder)


def named(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "template": NAMED.replace("NAME", name)} for name in names]


@pytest.mark.parametrize(
    ("template", "files"),
    [
        (named("default", "tool_use", "rag"), {}),
        (
            None,
            {
                "chat_template.jinja": NAMED.replace("NAME", "default"),
                "additional_chat_templates/tool_use.jinja": NAMED.replace("NAME", "tool_use"),
            },
        ),
    ],
)
def test_named_templates_are_chosen_as_transformers_does(
    tmp_path: Path, template: Any, files: dict[str, str]
) -> None:
    tokenizer = tokenizer_of(tmp_path, template, files)
    assert tokenizer.decode(encode_prompt(tokenizer, "Hi")) == "default Hi<|im_end|>"
    assert tokenizer.decode(encode_messages(tokenizer, TURNS, tools=TOOLS)).startswith("tool_use Hi")
    for tools, name in (((), "default"), (TOOLS, "tool_use")):
        token_ids, supervised = render_conversation(tokenizer, TURNS, tools=tools)
        assert tokenizer.decode(token_ids) == f"{name} Hi<|im_end|>{name} Yes<|im_end|>"
        assert any(supervised)


def test_names_of_transformers_are_no_arguments_of_a_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, NAMED + "{{ tone }}")
    token_ids, _ = render_conversation(tokenizer, TURNS, template_kwargs={"tone": "kind"})
    assert tokenizer.decode(token_ids).endswith("kind")
    with pytest.raises(UserError, match=r"IDLM-0217.*truncation"):
        render_conversation(tokenizer, TURNS, template_kwargs={"truncation": True})


DATED = (
    "{%- set day = strftime_now(\"%d %b %Y\") if strftime_now is defined else 'none' %}"
    "{{- day + strftime_now('%H:%M') + '\\n' }}" + NAMED
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, datetime.date]:
    """The day on which the code under test runs."""
    today = {"day": DAY}

    class Date(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return today["day"]

    monkeypatch.setattr(datetime, "date", Date)
    return today


@pytest.mark.parametrize("template", [DATED, [{"name": "default", "template": DATED}]])
def test_the_date_of_a_template_is_that_of_its_encoder(
    tmp_path: Path, template: Any, clock: dict[str, datetime.date]
) -> None:
    tokenizer = tokenizer_of(tmp_path, template)
    assert writes_date(tokenizer) and not writes_date(tokenizer_of(tmp_path / "plain", NAMED))
    first = Encoder(tokenizer, mask_token_id=None, use_chat_template=True)
    clock["day"] = NEXT
    later = Encoder(tokenizer, mask_token_id=None, use_chat_template=True)
    again = Encoder(tokenizer, mask_token_id=None, use_chat_template=True, date=DAY)
    texts = [
        each.tokenizer.decode(each.pair("Hi", "Yes", origin="here").token_ids)
        for each in (first, later, again)
    ]
    assert [text.partition("\n")[0] for text in texts] == [
        "31 Jan 202500:00",
        "01 Feb 202500:00",
        "31 Jan 202500:00",
    ]
    assert first.fingerprint() == again.fingerprint() != later.fingerprint()
    assert tokenizer.chat_template == (template if isinstance(template, str) else {"default": DATED})


def test_a_record_that_was_answered_on_another_day_is_refused_with_the_cause(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "{{- 'x' * (strftime_now('%d') | int) }}" + NAMED)
    encoders = {
        day: Encoder(tokenizer, mask_token_id=None, use_chat_template=True, date=day) for day in (DAY, NEXT)
    }
    prompt = encode_prompt(with_date(tokenizer, DAY), "Hi")
    record = {
        "token_ids": prompt[-2:],
        "text": "Hi",
        "finish_reason": "stop",
        "num_prompt_tokens": len(prompt),
    }
    error = refused(r"IDLM-0227.*date.*2025-02-01", encoders[NEXT].answer, "Hi", record, origin="here")
    assert "data.date" in error.fix
    (sample,) = encoders[DAY].answer("Hi", record, origin="here")
    assert sample.token_ids[: len(prompt)].tolist() == prompt


def test_a_run_goes_on_with_the_date_of_its_first_day(
    tmp_path: Path, clock: dict[str, datetime.date]
) -> None:
    """Its cache is gone, and is built again on another day."""
    tokenizer = tokenizer_of(tmp_path / "tokenizer", DATED)
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "Hi", "response": "Yes"}))
    config = TrainConfig(output_dir=str(tmp_path / "out"))
    run = tmp_path / "out" / RUN_FOLDER
    run.mkdir(parents=True)

    def start(cache: str, *, is_continued: bool, **data: Any) -> str:
        config.data = DataConfig(path=str(path), cache_dir=str(tmp_path / cache), **data)
        encoder = make_encoder(config.data, tokenizer, None, date=run_date(config))
        source = SOURCES.get("jsonl")(config.data, encoder)
        remember_data(run, source, date=encoder.date, is_continued=is_continued)
        return source.digest()

    first = start("a", is_continued=False)
    clock["day"] = NEXT
    assert start("b", is_continued=True) == first
    with pytest.raises(UserError, match=r"IDLM-0235.*date.*2025-02-01 now.*2025-01-31") as caught:
        start("b", is_continued=True, date="2025-02-01")
    assert "data.date=2025-01-31" in caught.value.fix
    assert start("b", is_continued=True, date="2025-01-31") == first
    (run / DATA_FILE).unlink()
    assert start("c", is_continued=False) != first, "a new run has its own day"


def test_a_date_is_checked_before_the_data_is_read() -> None:
    assert not [*data_problems(TrainConfig(data=DataConfig(date="2025-01-31")))]
    (problem,) = data_problems(TrainConfig(data=DataConfig(date="31.1.2025")))
    assert "data.date='31.1.2025'" in problem and "YYYY-MM-DD" in problem


@pytest.mark.parametrize("written", ["2025-01-31", "'2025-01-31'"])
def test_a_file_may_write_the_date_without_quotes(tmp_path: Path, written: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"data:\n  date: {written}\n")
    assert compose("train", TrainConfig, [f"config={path}"]).data.date == "2025-01-31"


BOS, EOS = "<|bos|>", "<|im_end|>"


def wrapping(single: str) -> Any:
    """A post-processor that puts special tokens around a text."""

    def made(tokenizer: Any) -> Any:
        from tokenizers.processors import TemplateProcessing

        tokens = [(text, tokenizer.token_to_id(text)) for text in (BOS, EOS)]
        return TemplateProcessing(single=single, special_tokens=tokens)

    return made


POSTS = {
    "nothing": (None, ""),
    "bos": (wrapping(f"{BOS} $A"), BOS),
    "eos": (wrapping(f"$A {EOS}"), ""),
    "both": (wrapping(f"{BOS} $A {EOS}"), BOS),
}


@pytest.fixture(params=POSTS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str]:
    """A tokenizer, and what it puts in front of a text."""
    post, front = POSTS[request.param]
    return load_tokenizer(save_tokenizer(tmp_path, FORMS["chatml"], post=post)), front


def test_samples_without_a_template_begin_as_prompts_do_and_end_once(case: tuple[Any, str]) -> None:
    tokenizer, front = case
    prompt = encode_prompt(tokenizer, "an answer", template="none")
    assert tokenizer.decode(prompt) == f"{front}an answer"
    encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=False)
    for output in ("thinks", f"thinks{EOS}", f"thinks{EOS}{EOS}", f"thinks{EOS}\n"):
        sample = encoder.pair("an answer", output, origin="here")
        assert sample.token_ids[~sample.supervised].tolist() == prompt
        assert tokenizer.decode(sample.token_ids[sample.supervised]) == f"thinks{EOS}"
        for text in (output, front + output):
            sample = encoder.text(text, origin="here")
            assert tokenizer.decode(sample.token_ids) == f"{front}thinks{EOS}"
            assert tokenizer.decode(sample.token_ids[sample.supervised]) == f"thinks{EOS}"
    sample = encoder.text(f"a{EOS}b", origin="here")
    assert tokenizer.decode(sample.token_ids) == f"{front}a{EOS}b{EOS}", "eos in the middle stays"


def test_a_template_writes_what_a_post_processor_adds_elsewhere(case: tuple[Any, str]) -> None:
    tokenizer, _ = case
    tokenizer.chat_template = FORMS["bos"]
    encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=True)
    sample = encoder.pair("an answer", "thinks", origin="here")
    prompt = encode_messages(tokenizer, [{"role": "user", "content": "an answer"}])
    assert sample.token_ids[: len(prompt)].tolist() == prompt == encode_prompt(tokenizer, "an answer")
    assert tokenizer.decode(sample.token_ids).count(BOS) == 1
    assert tokenizer.decode(sample.token_ids[sample.supervised]) == f"thinks{EOS}"


@pytest.mark.parametrize("form", ["chatml", "marked", "last thought", "opened, dropped"])
def test_an_answer_that_has_its_end_has_it_once(form: str) -> None:
    tokenizer = form_tokenizer(form)
    encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=True)
    (plain,) = encoder.messages(turns("b"), origin="here")
    for output in (f"b{EOS}", f"b{EOS}\n", f"b{EOS}{EOS}"):
        (sample,) = encoder.messages(turns(output), origin="here")
        assert sample.token_ids.tolist() == plain.token_ids.tolist()
        assert sample.supervised.tolist() == plain.supervised.tolist() and sample.notes == plain.notes


def test_an_end_that_the_template_does_not_write_stays() -> None:
    tokenizer = tokenizer_with(FORMS["chatml"].replace(EOS, ""))
    encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=True)
    (sample,) = encoder.messages(turns(f"b{EOS}"), origin="here")
    assert tokenizer.decode(sample.token_ids[sample.supervised]) == f"b{EOS}"


def test_an_answer_that_the_template_does_not_close_ends_by_the_tag_of_the_next_turn(tmp_path: Path) -> None:
    question = {"role": "user", "content": "a"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [question, call, {"role": "tool", "content": "7"}, *turns("Yes"), *turns("No")]
    # Text that begins a turn ends none.
    for tags, (user, tool) in (([], ("", "")), (["<|user|>", "<|tool|>"], ("<|user|>", "<|tool|>"))):
        tokenizer = load_tokenizer(save_tokenizer(tmp_path, NOT_CLOSED))
        tokenizer.add_special_tokens({"additional_special_tokens": tags})
        encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=True)
        (sample,) = encoder.messages(messages, origin="here")
        expected = f'\n{{"name": "f", "arguments": {{}}}}{tool}\nYes{user}\nNo{user}'
        assert tokenizer.decode(sample.token_ids[sample.supervised]) == expected
        assert tokenizer.decode(sample.token_ids) == render(tokenizer, messages, open_turn=False) + user
        closed = [*messages[:-1], {"role": "assistant", "content": f"No{user}"}]
        (again,) = encoder.messages(closed, origin="here")
        assert again.token_ids.tolist() == sample.token_ids.tolist()


@pytest.mark.parametrize(
    ("between", "end"), [("system", ""), ("assistant", ""), ("tool", "<|tool|>"), ("user", "<|user|>")]
)
def test_a_turn_that_begins_as_no_answer_ends_is_no_end_of_one(
    tmp_path: Path, between: str, end: str
) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, NOT_CLOSED))
    special = ["<|user|>", "<|tool|>", "<|system|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=True)
    messages = [*turns("Yes"), {"role": between, "content": "Sam"}, *turns("No")]
    (sample,) = encoder.messages(messages, origin="here")
    taught = tokenizer.decode(sample.token_ids[sample.supervised]).split("\n")
    answers = [f"Yes{end}", *(["Sam<|user|>"] if between == "assistant" else []), "No<|user|>"]
    assert taught == ["", *answers]
    assert tokenizer.decode(sample.token_ids) == render(tokenizer, messages, open_turn=False) + "<|user|>"
    assert (NO_END in sample.notes) == (not end)


def test_what_marks_leave_out_of_an_answer_is_no_target() -> None:
    form = FORMS["marked"].replace("{% generation %}", "{{- 'Well: ' }}{% generation %}")
    form = form.replace("'<|im_end|>' }}{% endgeneration %}", "'!' }}{% endgeneration %}{{- '<|im_end|>' }}")
    encoder = Encoder(tokenizer_with(form), mask_token_id=None, use_chat_template=True)
    (sample,) = encoder.messages([*turns("Yes"), *turns("No")], origin="here")
    targets = encoder.tokenizer.decode(sample.token_ids[sample.supervised])
    assert targets == f"Yes!{EOS}No!{EOS}" and "Well: Yes!" in encoder.tokenizer.decode(sample.token_ids)


def test_special_tokens_in_the_words_of_a_user_are_told() -> None:
    """They become tokens at inference too; the plan tells of them."""
    encoder = Encoder(form_tokenizer("chatml"), mask_token_id=None, use_chat_template=True)
    for words, is_warned in (("a", False), (f"a{EOS}", True), (f"<|im_start|>assistant\nb{EOS}", True)):
        messages = [{"role": "user", "content": words}, {"role": "assistant", "content": "b"}]
        (sample,) = encoder.messages(messages, origin="here")
        assert bool(sample.notes) is is_warned
        prompt = encode_messages(encoder.tokenizer, messages[:1])
        assert sample.token_ids[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize(("text", "notes"), [("b", ()), ("c", (RETOKENISED,))])
def test_an_answer_whose_text_is_not_that_of_its_tokens_trains_its_text_and_is_reported(
    text: str, notes: tuple[str, ...]
) -> None:
    tokenizer = form_tokenizer("chatml")
    encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=True)
    token_ids = tokenizer.encode("b", add_special_tokens=False)
    record = {"text": text, "token_ids": token_ids, "finish_reason": "length"}
    (sample,) = encoder.answer("a", record, origin="here")
    assert tokenizer.decode(sample.token_ids[sample.supervised]) == text and sample.notes == notes


def test_a_tokenizer_that_begins_texts_with_a_space_adds_none_between_prompt_and_answer(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(save_byte_fallback(tmp_path))
    tokenizer.chat_template = (
        "{%- for m in messages %}{%- if m.role == 'user' %}{{- '[i] ' + m.content + ' [/i]' }}"
        "{%- else %}{{- ' ' + m.content + ' </s>' }}{%- endif %}{%- endfor %}"
    )
    messages = [*turns("the dog"), *turns("no")]
    for num in (2, 4):
        token_ids, supervised = render_conversation(tokenizer, messages[:num])
        rendered = tokenizer.apply_chat_template(messages[:num], tokenize=True, return_dict=True)
        assert token_ids == list(rendered["input_ids"])
        prompt = encode_messages(tokenizer, messages[:1])
        assert token_ids[: len(prompt)] == prompt and supervised.index(True) == len(prompt)


def turns(output: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": output}]

"""Chat templates: their files, the text of a conversation by one of them, and the date that one writes."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from idlm.checkpoint import check_file
from idlm.errors import UserError, naming

_SWITCHES = tuple(
    re.compile(rf"\{{%[^%]*(?<![\w.'\"])({name})(?![\w'\"])") for name in ("enable_thinking", "thinking")
)
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE_CALL = re.compile(r"strftime_now\s*\(\s*(?:format\s*=\s*)?(?:'([^']*)'|\"([^\"]*)\")\s*\)")
_ANY_DATE_CALL = re.compile(r"strftime_now\s*\(")
ID_LENGTH = 9
_SHORT_IDS = f"length != {ID_LENGTH}"
"""In Mistral's templates, which refuse other ids of calls."""
TEMPLATE_FOLDER = "additional_chat_templates"
"""Where a tokenizer stores templates other than its first one, as *.jinja."""
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
DEFAULT, TOOL_USE = "default", "tool_use"
_TAKEN_NAMES = frozenset(
    (
        *("conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "sanitize_control_tokens", "tokenizer_kwargs"),
    )
)
"""What transformers itself passes to a template."""

Message = Mapping[str, Any]


def template_text(tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the chat template for a conversation with `tools`: of several, `tool_use` where there are tools
    and such a template, else `default`. UserError IDLM-0215 where there is none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get(TOOL_USE if tools and TOOL_USE in template else DEFAULT)
    if template:
        return str(template)
    if not tokenizer.chat_template:
        raise UserError(
            "IDLM-0215",
            "the tokenizer has no chat template, so messages cannot be rendered",
            fix="give plain text, or add chat_template to tokenizer_config.json",
        )
    raise UserError(
        "IDLM-0215",
        f"the tokenizer has the chat templates {', '.join(sorted(tokenizer.chat_template))} and none of the "
        f"name {DEFAULT!r}, so messages cannot be rendered",
        fix="save the one to use as chat_template.jinja next to tokenizer_config.json, which makes it the "
        f"default, or give it the name {DEFAULT!r} where it is listed",
    )


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    open_turn: bool,
    enable_thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a conversation; with `open_turn` it ends where the assistant's turn begins. `tools`
    that the assistant may call: JSON schemas of functions, as OpenAI writes them. `template_kwargs`: further
    names that the template sees.

    Raises UserError IDLM-0215 without a chat template, IDLM-0217 if the template refuses the messages."""
    template = template_text(tokenizer, tools)
    if not messages:
        return ""
    extra = template_names(template, tools, enable_thinking=enable_thinking, template_kwargs=template_kwargs)
    # Templates are user data: they raise jinja2's errors, and others for messages they do not expect.
    what = f"the chat template refuses {[message.get('role') for message in messages]}"
    fix = "give messages with the roles and fields that this model's template supports"
    with naming("IDLM-0217", what, fix=fix):
        text: str = applied(
            tokenizer, template, messages, tokenize=False, add_generation_prompt=open_turn, **extra
        )
    return text


def template_names(
    template: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    enable_thinking: bool | None,
    template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return a template's variables besides the messages, `enable_thinking` under the name that it has there.
    UserError IDLM-0217 for names that are not free."""
    extra: dict[str, Any] = dict(template_kwargs or {})
    taken = sorted(extra.keys() & _TAKEN_NAMES)
    if taken:
        raise UserError(
            "IDLM-0217",
            f"an argument of the chat template has the name {taken[0]!r}, which transformers uses itself",
            fix="leave it out",
        )
    if enable_thinking is not None:
        extra[thinking_switch(template) or "enable_thinking"] = enable_thinking
    if tools:
        extra["tools"] = [dict(tool) for tool in tools]
    return extra


def applied(tokenizer: Any, template: str, messages: Sequence[Message], **options: Any) -> Any:
    """Return what the tokenizer's template makes of messages; developers are the system of one without
    them, and ids of calls are short for one that takes no others."""
    known = [dict(message) for message in messages]
    for message in known:
        if message.get("role") == "developer" and "developer" not in template:
            message["role"] = "system"
    if _SHORT_IDS in template:
        known = [_with_short_ids(message) for message in known]
    try:
        made = tokenizer.apply_chat_template(known, **options)
    except TypeError:
        # Those of DeepSeek join the arguments of a call as text.
        return tokenizer.apply_chat_template(_with_text_arguments(known), **options)
    calls = [call.get("function") or {} for message in known for call in message.get("tool_calls") or ()]
    given = [each for call in calls if isinstance(each := call.get("arguments"), dict) and each]
    if isinstance(made, str) and any(str(value) in made for value in given):
        # It may write objects as Python does. One that writes JSON then writes that of a text; others fail.
        with contextlib.suppress(Exception):
            joined = tokenizer.apply_chat_template(_with_text_arguments(known), **options)
            made = joined if all(json.dumps(each, ensure_ascii=False) in joined for each in given) else made
    return made


def _with_short_ids(value: Any) -> Any:
    """Return a message, its calls or one of them with ids of nine letters and digits."""
    if isinstance(value, (list, tuple)):
        return [_with_short_ids(each) for each in value]
    changed = dict(value)
    for key in {"id", "tool_call_id"} & changed.keys():
        name = str(changed[key])
        is_short = len(name) == ID_LENGTH and name.isalnum()
        changed[key] = name if is_short else hashlib.sha256(name.encode()).hexdigest()[:ID_LENGTH]
    return changed | ({"tool_calls": _with_short_ids(calls)} if (calls := changed.get("tool_calls")) else {})


def _with_text_arguments(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with the arguments of calls as JSON text."""
    given = copy.deepcopy([dict(message) for message in messages])
    for call in (call for message in given for call in message.get("tool_calls") or ()):
        function = call.get("function") or {}
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return given


def all_template_text(tokenizer: Any) -> str:
    """Return the text of all chat templates; empty without one."""
    template = None if tokenizer is None else tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


@functools.cache
def thinking_switch(template: str) -> str | None:
    """Return the variable by which a template switches reasoning on or off; None where it has none."""
    found = (switch.search(template) for switch in _SWITCHES)
    return next((match[1] for match in found if match), None)


def marks_answers(template: str) -> bool:
    return _GENERATION_BLOCK.search(template) is not None


def writes_date(tokenizer: Any) -> bool:
    return _ANY_DATE_CALL.search(all_template_text(tokenizer)) is not None


def with_date(tokenizer: Any, date: datetime.date) -> Any:
    """Return a copy of the tokenizer whose chat templates write `date` (and midnight) on every day. UserError
    IDLM-0219 where a template computes the format of its date."""
    dated, given = copy.copy(tokenizer), tokenizer.chat_template
    each = given if isinstance(given, dict) else {"": given}
    each = {name: _dated(text, date) for name, text in each.items()}
    dated.chat_template = each if isinstance(given, dict) else each[""]
    return dated


def _dated(template: str, date: datetime.date) -> str:
    moment = datetime.datetime.combine(date, datetime.time())
    text = _DATE_CALL.sub(lambda call: repr(moment.strftime(call[1] or call[2] or "")), template)
    if _ANY_DATE_CALL.search(text):
        raise UserError(
            "IDLM-0219",
            "the chat template writes today's date in a format that it computes, so the training data would "
            "differ from day to day",
            fix="write the format as text in the template: strftime_now('%d %b %Y')",
        )
    return text


def unusable_files(directory: Path, names: Iterable[str]) -> list[str]:
    """Return the files of `names`, and the templates, that must not be read, each with the reason. The text
    of a template reaches prompts and answers, so one that links to a file outside of the folder would show
    it. A cache of the hub stores the files of its snapshots next to them: these are inside."""
    templates = [directory / name for name in TEMPLATE_FILES]
    templates += sorted(directory.glob(f"{TEMPLATE_FOLDER}/*.jinja"))
    home = directory.resolve()
    inside = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    problems = []
    for path in dict.fromkeys((*(directory / name for name in names), *templates)):
        if not path.exists():
            continue
        name = path.relative_to(directory).as_posix()
        try:
            check_file(path)
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
            continue
        if path in templates and not any(path.resolve().is_relative_to(folder) for folder in inside):
            problems.append(f"{name}: it links to a file outside of the folder")
    return problems

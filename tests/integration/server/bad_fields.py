"""Requests of which one field is wrong, with the name of that field in the error."""

from __future__ import annotations

from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
VALID = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
}
FLAT = {"name": "f", "call_id": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [1, 10**6]}, "prompt"),
    (COMPLETIONS, {"prompt": [3] * 48}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "seed": 10**30}, "seed"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "n": 4}, "n"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a", ""]}, "stop.1"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "decoder_options": {"steps": 3}}, "decoder_options"),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature"),
    (COMPLETIONS, {"prompt": "a", "model": "another"}, "model"),
    (COMPLETIONS, {"prompt": "a", "token_ids": [5]}, "token_ids"),
    (COMPLETIONS, {"prompt": ["a"], "add_special_tokens": False}, "add_special_tokens"),
    (CHAT, {**VALID[CHAT], "add_special_tokens": True}, "add_special_tokens"),
    (CHAT, {**VALID[CHAT], "type": "text"}, "type"),
    (COMPLETIONS, {"prompt": "a", "frequency_penalty": 2.5}, "frequency_penalty"),
    (COMPLETIONS, {"prompt": "a", "presence_penalty": -2.5}, "presence_penalty"),
    (CHAT, {**VALID[CHAT], "repetition_penalty": 1e-300}, "repetition_penalty"),
    (CHAT, {**VALID[CHAT], "logit_bias": {"3": 101}}, "logit_bias.3"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1000000": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"three": 1}}, "logit_bias.three"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": [3]}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"05": 1, "5": 2}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
    (
        COMPLETIONS,
        {"prompt": "a", "stream_options": {"include_usages": True}},
        "stream_options.include_usages",
    ),
    (COMPLETIONS, {"prompt": "a", "decoder_options": {"stride": "\ud800"}}, "decoder_options.stride"),
    (COMPLETIONS, {"prompt": ["a"] * 6}, "prompt"),
    (CHAT, {**VALID[CHAT], "stream_options": {"every": 1}}, "stream_options.every"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]},
        "messages.0.tool_calls",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]},
        "messages.0.tool_call_id",
    ),
    *(
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {**CALL["function"], **bad}}]}]},
            f"messages.0.tool_calls.0.function.{name}",
        )
        for name, bad in (
            ("arguments", {"arguments": "{"}),
            ("arguments", {"arguments": {"a": "\ud800"}}),
            ("arguments", {"arguments": '{"a": "\\ud800"}'}),
            ("arguments", {"arguments": '{"a": 1e999}'}),
            ("arguments", {"arguments": '{"a": ' * 101 + "1" + "}" * 101}),
            ("name", {"name": ""}),
        )
    ),
    (CHAT, {**VALID[CHAT], "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {**VALID[CHAT], "tools": [{"type": "function"}]}, "tools.0.function"),
    (CHAT, {**VALID[CHAT], "tools": [{"function": {"name": "f"}}]}, "tools.0.type"),
    (CHAT, {**VALID[CHAT], "tools": [tool(name="")]}, "tools.0.function.name"),
    (CHAT, {**VALID[CHAT], "tools": [tool(strict=1)]}, "tools.0.function.strict"),
    (CHAT, {**VALID[CHAT], "tools": [tool(parameters={"type": "array"})]}, "tools.0.function.parameters"),
    (CHAT, {**VALID[CHAT], "tools": [tool(parameters={"minimum": 1e400})]}, "tools.0"),
    (CHAT, {**VALID[CHAT], "tools": [tool(), tool()]}, "tools.1.function.name"),
    (CHAT, {**VALID[CHAT], "tools": [tool(parameters={"a": "\ud800"})]}, "tools.0"),
    (CHAT, {**VALID[CHAT], "tools": [tool()]}, "tools"),
    (CHAT, {**VALID[CHAT], "tools": [tool()], "tool_choice": "always"}, "tool_choice"),
    (CHAT, {**VALID[CHAT], "tool_choice": "required"}, "tool_choice"),
    (CHAT, {**VALID[CHAT], "tools": [tool()], "tool_choice": tool(name="g")}, "tool_choice.function.name"),
    (CHAT, {**VALID[CHAT], "tools": [tool()], "tool_choice": "required", "guided_regex": "1"}, "tools"),
    (CHAT, {**VALID[CHAT], "tools": [tool()], "guided_json": "no json"}, "guided_json"),
    (
        CHAT,
        {**VALID[CHAT], "chat_template_kwargs": {"enable_thinking": 1}},
        "chat_template_kwargs.enable_thinking",
    ),
    (CHAT, {**VALID[CHAT], "chat_template_kwargs": {"content": "dry"}}, "chat_template_kwargs.content"),
    (CHAT, {**VALID[CHAT], "chat_template_kwargs": {"tone": "\ud800"}}, "chat_template_kwargs"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "refusal": "b"}]}, "messages.0.refusal"),
    *((COMPLETIONS, {"prompt": "a", "max_tokens": bad}, "max_tokens") for bad in (2.5, True, "2")),
    (CHAT, {**VALID[CHAT], "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    (CHAT, {**VALID[CHAT], "response_format": {"type": "yaml"}}, "response_format.type"),
    (CHAT, {**VALID[CHAT], "response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    (CHAT, {**VALID[CHAT], "guided_json": {"minimum": 1e400}}, "guided_json"),
    (CHAT, {**VALID[CHAT], "guided_regex": "((("}, "guided_regex"),
    (CHAT, {**VALID[CHAT], "guided_json": {"type": "frob"}}, "guided_json"),
    (COMPLETIONS, {"prompt": "a", "guided_choice": [""]}, "guided_choice.0"),
    (COMPLETIONS, {"prompt": "a", "guided_regex": "1", "guided_choice": ["1"]}, "guided_choice"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regexp": "1"}}, "structured_outputs.regexp"),
    *(
        (RESPONSES, {"input": "a", **wrong}, param)
        for wrong, param in (
            ({"input": []}, "input"),
            ({"input": [{"role": "user", "content": "\ud800"}]}, "input.0.content"),
            ({"input": [{"role": "user"}]}, "input.0.content"),
            ({"input": [{"type": "web_search_call", "id": "a"}]}, "input.0.type"),
            ({"input": [{"type": "message", "role": "user", "content": "a", "name": "b"}]}, "input.0.name"),
            ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input.0.arguments"),
            ({"input": [{"type": "function_call", **FLAT, "arguments": "{"}]}, "input.0.arguments"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_tokens": 5}, "max_tokens"),
            ({"response_format": {"type": "text"}}, "response_format"),
            ({"messages": [1]}, "messages"),
            ({"tools": [{"type": "function", "name": "f", "function": {"name": "f"}}]}, "tools.0.function"),
            (
                {"input": [{"role": "user", "content": "a", "function_call": {"name": "f"}}]},
                "input.0.function_call",
            ),
            ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
            ({"n": 2}, "n"),
            ({"background": True}, "background"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"truncation": "auto"}, "truncation"),
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"include": ["file_search_call.results"]}, "include.0"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
            ({"metadata": {"a": 1}}, "metadata.a"),
            ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
            ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
            ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
            ({"text": {"format": {"type": "text", "schema": {"minimum": 1e400}}}}, "text.format"),
            ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
            ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools.1.name"),
            ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
            ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
            ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        )
    ),
]

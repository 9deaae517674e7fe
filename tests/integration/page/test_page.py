"""The page of `idlm-serve` in a real browser: what a person types goes to the server, and what the server
sends is shown. `IDLM_SCREENSHOTS=docs/plots` stores the screenshots of the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.page.browser import chromium, needs_browser, opened, store_screenshot
from tests.integration.server.servers import CALLER_WORDS, TINY, Running, caller, events, running

pytestmark = [pytest.mark.sweep, needs_browser]

PROMPT = "Mia has 5 nuts. Mia breaks 2. Mia picks 1. Mia uses 4. Mia earns 6. How many nuts does Mia have?"
KEY = "secret-of-the-test"
CHAT = "/v1/chat/completions"
WIDE, PHONE = {"width": 1100, "height": 620}, {"width": 360, "height": 700}
TOOL = {"type": "function", "function": {"name": "town", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """The converted model that the repository holds, which accepts most drafts."""
    words = ("decoder.stride=4", "mask_token_id=null", "max_length=2048", "page_size=16")
    with running(*words, model=TINY.parent / "tiny_idlm") as found:
        yield found


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    with opened(browser, server.url, viewport=WIDE, color_scheme="light") as found:
        ready(found)
        yield found


def ready(page: Any) -> None:
    page.locator("#model", has_text="decoder isd").wait_for()


def ask(page: Any, text: str = PROMPT) -> Any:
    """Send a message and wait for the end of the answer; returns its element."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.locator("#send").wait_for()
    return page.locator(".answer").last


def figure(shown: Any, name: str) -> float:
    return float(shown.locator(f"[data-figure='{name}']").inner_text())


def text_of(shown: Any) -> str:
    text: str = shown.locator("[data-answer]").evaluate("element => element.textContent")
    return text


def streamed(server: Running, text: str = PROMPT, **fields: Any) -> list[dict[str, Any]]:
    """The choices of the chunks that the server sends for a greedy answer."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "stream": True, **fields}
    with server.client.stream("POST", CHAT, json=body) as response:
        return [choice for chunk in events(response.iter_lines()) for choice in chunk["choices"]]


def test_tokens_of_one_pass_share_a_colour(page: Any, server: Running) -> None:
    choices = streamed(server, stream_options={"include_passes": True})
    passes = [one for choice in choices for one in choice["passes"]]
    together = [c["delta"]["content"] for c in choices if sum(one["tokens"] for one in c["passes"]) > 1]
    answer = ask(page)
    assert text_of(answer) == "".join(choice["delta"]["content"] for choice in choices)
    spans = answer.locator("[data-answer] .pass")
    assert spans.evaluate_all("all => all.map(one => one.textContent)") == [one for one in together if one]
    neighbours = spans.evaluate_all("all => all.map(one => one.className)")
    assert len(neighbours) > 5 and all(a != b for a, b in zip(neighbours, neighbours[1:], strict=False))
    assert figure(answer, "passes") == len(passes)
    assert figure(answer, "tokens") == sum(one["tokens"] for one in passes)
    assert figure(answer, "tokens per forward") > 2
    shares = answer.locator(".position").evaluate_all("all => all.map(one => one.title)")
    first = sum(one["tested"] > 0 for one in passes), sum(one["accepted"] > 0 for one in passes)
    assert shares[0] == f"draft 1: {first[1]} of {first[0]} accepted" and len(shares) == 3
    store_screenshot(page, "chat")


def test_a_chat_goes_on_and_begins_anew(page: Any) -> None:
    bodies = list[dict[str, Any]]()
    page.on("request", lambda one: bodies.append(one.post_data_json) if one.post_data else None)
    page.fill("#system", "Count <b>well</b>.")
    first = text_of(ask(page))
    ask(page, "And <img src=x onerror=alert(1)>?")
    roles = [message["role"] for message in bodies[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert bodies[-1]["messages"][2]["content"] == first
    assert page.locator(".message img").count() == 0
    page.click("#again")
    page.locator("#send").wait_for()
    assert bodies[-1] == bodies[-2] and page.locator(".answer").count() == 2
    page.click("#new")
    page.locator("#chat .examples button").first.click()
    page.click("#new")
    ask(page)
    # The answer that was under way belongs to no conversation.
    assert [message["role"] for message in bodies[-1]["messages"]] == ["system", "user"]


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop_ends_the_answer_and_frees_the_server(page: Any, server: Running, way: str) -> None:
    page.check("[data-field=ignore_eos]")
    page.fill("[data-field=max_tokens]", "1900")
    page.fill("#prompt", PROMPT)
    page.click("#send")
    page.locator(".answer .pass").first.wait_for()
    page.click("#stop") if way == "button" else page.keyboard.press(way)
    page.locator(".answer", has_text="Stopped.").wait_for()
    server.wait_until_idle()
    part = text_of(page.locator(".answer"))
    assert part
    page.uncheck("[data-field=ignore_eos]")
    page.fill("[data-field=max_tokens]", "8")
    with page.expect_request(lambda one: one.method == "POST") as sent:
        ask(page, "Go on")
    # What was read stays in the conversation.
    assert sent.value.post_data_json["messages"][1] == {"role": "assistant", "content": part}


def race(page: Any, order: str = "alone") -> list[Any]:
    page.click("#tab-race")
    page.fill("#race-prompt", PROMPT)
    page.select_option("#race-order", order)
    page.click("#race-start")
    page.locator("#replay").wait_for()
    return page.locator(".side").all()


@pytest.mark.parametrize("order", ["alone", "together"])
def test_a_greedy_race_has_one_answer_and_two_speeds(page: Any, server: Running, order: str) -> None:
    if order == "together":
        page.fill("[data-field=max_tokens]", "40")
    left, right = race(page, order)
    if order == "alone":
        store_screenshot(page, "race")
    answer = "".join(choice["delta"]["content"] for choice in streamed(server))
    for is_replayed in (False, True):
        assert text_of(left) == text_of(right) and answer.startswith(text_of(left))
        assert figure(left, "tokens per forward") == 1 < 2 < figure(right, "tokens per forward")
        assert figure(left, "tokens/s") > 0 and figure(right, "tokens/s") > 0
        assert left.locator(".pass").count() == 0 < right.locator(".pass").count()
        assert page.locator("mark").count() == 0
        assert page.inner_text("#verdict").startswith("The answers are the same.")
        # The replay ends as the race did.
        if not is_replayed:
            page.click("#replay")
            page.locator("#replay").wait_for()


def test_a_race_of_any_two_settings_marks_what_differs(page: Any) -> None:
    page.click("#tab-race")
    for side, seed in zip(page.locator(".side").all(), (1, 2), strict=True):
        side.locator(".preset").select_option("own")
        side.locator(".fields").fill(json.dumps({"temperature": 1.5, "seed": seed, "max_tokens": 60}))
    left, right = race(page)
    assert page.inner_text("#verdict").startswith("The answers differ where they are marked.")
    assert text_of(left) != text_of(right)
    for side in (left, right):
        whole, marked = text_of(side), side.locator("mark").all_text_contents()
        assert "".join(marked) and len("".join(marked)) <= len(whole)
    kept = [
        side.locator("[data-answer]").evaluate(
            "place => { const copy = place.cloneNode(true);"
            "copy.querySelectorAll('mark').forEach(one => one.remove()); return copy.textContent; }"
        )
        for side in (left, right)
    ]
    assert kept[0] == kept[1]


def test_mistakes_are_said_and_can_be_mended(page: Any, server: Running) -> None:
    """Of the person, who gets the turn back; of a field before anything is sent; and of the network."""
    page.fill("[data-field=top_p]", "7")
    assert "top_p" in ask(page).locator("[role=alert]").inner_text()
    assert page.input_value("#prompt") == PROMPT
    page.fill("[data-field=top_p]", "")
    page.fill("[data-field=decoder_options]", '{"stride": ')
    assert "decoder_options: not valid JSON" in ask(page).locator("[role=alert]").inner_text()
    page.fill("[data-field=decoder_options]", '{"stride": 9}')
    assert "IDLM" not in ask(page).locator("[role=alert]").inner_text()
    page.fill("[data-field=decoder_options]", '{"stride": 1}')
    page.route("**/v1/**", lambda route: route.abort())
    assert "cannot be reached" in ask(page).locator("[role=alert]").inner_text()
    page.unroute("**/v1/**")
    answer = ask(page, page.input_value("#prompt"))
    assert text_of(answer) and figure(answer, "tokens per forward") == 1
    page.fill("[data-field=min_p]", "2")
    page.click("#tab-race")
    page.click("#race-start")
    page.locator(".side [role=alert]", has_text="min_p").wait_for()


def test_the_page_waits_for_a_server_that_loads(page: Any) -> None:
    loading = {"status": "loading", "served_model_name": "tiny", "engine": None}
    page.route("**/server_info", lambda route: route.fulfill(json=loading), times=1)
    page.reload()
    page.locator("#model", has_text="tiny: loading").wait_for()
    ready(page)


@pytest.mark.parametrize("has_template", [True, False])
def test_plain_text_is_continued(page: Any, server: Running, has_template: bool) -> None:
    """A model without a chat template has nothing else."""
    if has_template:
        page.select_option("#prompt-kind", "text")
    else:
        page.route("**/tokenizer_info", lambda route: route.fulfill(json={"chat_template": None}))
        page.reload()
        page.locator("#model", has_text="no chat template: text is continued").wait_for()
    page.fill("[data-field=max_tokens]", "12")
    # Fields of chats alone are left out.
    page.fill("[data-field=reasoning_effort]", "low")
    text = text_of(ask(page, "Mia has"))
    assert text == server.completion(prompt="Mia has", max_tokens=12, temperature=0)["choices"][0]["text"]


def test_an_answer_follows_a_schema_or_a_regex(page: Any) -> None:
    page.select_option("#constraint-kind", "regex")
    page.fill("#constraint", "[0-9]{3}-[0-9]{2}")
    text = text_of(ask(page))
    assert len(text) == 6 and text[3] == "-" and text.replace("-", "").isdigit()
    page.select_option("#constraint-kind", "json")
    page.fill("#constraint", json.dumps({"type": "object", "properties": {"nuts": {"enum": [1, 2]}}}))
    with page.expect_request(lambda one: one.method == "POST") as sent:
        ask(page)
    assert sent.value.post_data_json["structured_outputs"]["json"]["properties"] == {"nuts": {"enum": [1, 2]}}


def test_every_setting_of_a_request_has_a_field(page: Any) -> None:
    """The fields of the server's schema, but for those that the page sets itself."""
    schema = page.evaluate("fetch('openapi.json').then(one => one.json())")
    allowed = {*schema["components"]["schemas"]["ChatRequest"]["properties"]}
    fields = page.locator("[data-field]").evaluate_all("all => all.map(one => one.dataset.field)")
    # Constraints have one box for all of their names; log-probabilities are not shown.
    shown = {
        *fields,
        "messages",
        "model",
        "stream",
        "stream_options",
        "structured_outputs",
        "response_format",
    }
    others = {"logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "chat_template_kwargs"}
    same = {"max_completion_tokens", "reasoning", *(name for name in allowed if name.startswith("guided_"))}
    panel = page.locator("#settings-fold")
    assert panel.evaluate("one => one.scrollWidth <= one.clientWidth")
    assert {*fields} <= allowed and allowed <= shown | others | same, allowed - shown - others - same


def test_calls_are_shown_and_their_results_sent(browser: Any) -> None:
    with running(*CALLER_WORDS, model=caller()) as server, opened(browser, server.url) as page:
        ready(page)
        page.fill("[data-field=tools]", json.dumps([TOOL]))
        answer = ask(page)
        assert "why" in answer.locator(".thought .text").evaluate("one => one.textContent")
        assert json.loads(answer.locator(".call").inner_text()[len("town(") : -1]) == {
            "city": "Rome",
            "size": 1,
        }
        page.get_by_label("Result of town").fill("sunny")
        with page.expect_request(lambda one: one.method == "POST") as sent:
            page.click("text=Send results")
        page.locator("#send").wait_for()
        called, result = sent.value.post_data_json["messages"][1:]
        assert (result["role"], result["content"]) == ("tool", "sunny")
        assert result["tool_call_id"] == called["tool_calls"][0]["id"]
        page.fill("[data-field=n]", "2")
        page.fill("[data-field=tools]", "")
        page.click("#new")
        ask(page)
        assert page.locator(".answer").count() == 2


def test_the_key_stays_in_memory(browser: Any) -> None:
    words = ("decoder.stride=4", "mask_token_id=null")
    with (
        running(*words, api_key=KEY, model=TINY.parent / "tiny_idlm") as server,
        opened(browser, server.url) as page,
    ):
        dialog = page.locator("#key-dialog")
        for key, words in (("wrong", "needs a key"), ("schl\u00fcssel", "needs a key"), (KEY, "ASCII")):
            dialog.locator("#key-error", has_text=words).wait_for()
            page.fill("#key", key)
            page.keyboard.press("Enter")
        ready(page)
        page.fill("[data-field=max_tokens]", "8")
        assert text_of(ask(page))
        kept = page.evaluate(
            "[...Object.values(localStorage), ...Object.values(sessionStorage), document.cookie,"
            "document.documentElement.outerHTML,"
            "...[...document.querySelectorAll('input')].map(one => one.value)]"
        )
        assert not [text for text in kept if KEY in text]
        # A key that is no longer right is noticed with the next message.
        page.click("#key-button")
        page.fill("#key", "wrong")
        page.click("text=Use it")
        page.locator("#key-error", has_text="needs a key").wait_for()
        page.fill("#key", KEY)
        page.click("#key-cancel")
        page.wait_for_function("document.querySelector('#key').value === ''")
        # The load, which is read every second, asks once.
        page.click("#tab-load")
        dialog.wait_for()
        page.click("#key-cancel")
        page.wait_for_timeout(1500)
        assert not dialog.is_visible()
        page.click("#tab-chat")
        ask(page)
        assert dialog.is_visible() and page.locator("[role=alert]", has_text="authorization").is_visible()
        page.reload()
        dialog.locator("#key-error", has_text="needs a key").wait_for()


def test_load_shows_the_metrics(page: Any, server: Running) -> None:
    ask(page)
    server.wait_until_idle()
    emitted = int(server.metric("vllm:generation_tokens_total"))
    page.click("#tab-load")
    page.locator("[data-card='tokens emitted']", has_text=str(emitted)).wait_for()
    pages = page.locator("[data-card='KV pages in use']").inner_text()
    assert pages == f"0 of {server.front.service.info.num_pages}"
    assert page.locator("[data-card=running]").inner_text() == "0"
    assert page.locator("#load .position").count() == 3
    # A second look gives a rate.
    page.locator("#speed-line polyline").wait_for(state="attached")
    assert not page.locator("#settings").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_and_a_keyboard_are_enough(browser: Any, server: Running, scheme: str) -> None:
    with opened(browser, server.url, viewport=PHONE, color_scheme=scheme, has_touch=True) as page:
        ready(page)
        ask(page)
        if scheme == "dark":
            store_screenshot(page, "phone")
        colour = "getComputedStyle(document.body).backgroundColor"
        first = page.evaluate(colour)
        page.locator("#tab-chat").focus()
        for name in ("race", "load", "chat"):
            page.keyboard.press("ArrowRight")
            assert page.evaluate("document.activeElement.id") == f"tab-{name}"
            assert page.locator(f"#{name}").is_visible()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator("#tab-race").click()
        unnamed = page.evaluate(
            "[...document.querySelectorAll('input, textarea, select, button')].filter(one =>"
            "!one.labels?.length && !one.ariaLabel && !one.textContent.trim()).map(one => one.outerHTML)"
        )
        assert not unnamed
        other = {"light": "dark", "dark": "light"}[scheme]
        while page.evaluate("document.documentElement.dataset.theme") != other:
            page.click("#theme")
        assert page.evaluate(colour) != first

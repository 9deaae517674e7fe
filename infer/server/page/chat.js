// The conversation. A turn whose answer fails is forgotten; a part of an answer that was stopped stays.

import { Answer } from "./answer.js";
import { stream } from "./api.js";
import { announce, byId, make } from "./dom.js";
import { request } from "./settings.js";

const hello = document.querySelector(".hello");
let messages = [];
let running = null;

export function startChat() {
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = byId("prompt").value;
    if (running || !text.trim()) return;
    byId("prompt").value = "";
    turn([{ role: "user", content: text }]);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    // While an input method composes a character, Enter ends that.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("chat-form").requestSubmit();
  });
  byId("stop").addEventListener("click", stop);
  byId("again").addEventListener("click", again);
  byId("new").addEventListener("click", clear);
}

export function firstPrompt() {
  return messages[0]?.content ?? "";
}

export function stop() {
  running?.abort();
}

function clear() {
  stop();
  // The answer that was stopped belongs to no conversation any more.
  running = null;
  messages = [];
  byId("turns").replaceChildren(hello);
  showButtons();
  byId("prompt").focus();
}

// Send the last turn once more, with the settings as they are now.
function again() {
  const start = messages.findLastIndex((message) => message.role !== "assistant");
  const given = messages.findLastIndex((message, index) => index < start && message.role === "assistant") + 1;
  const asked = messages.slice(given, start + 1);
  messages = messages.slice(0, given);
  const shown = [...byId("turns").querySelectorAll("[data-turn]")];
  shown.filter((element) => Number(element.dataset.turn) >= given).forEach((element) => element.remove());
  turn(asked);
}

async function turn(added) {
  const place = byId("turns");
  place.querySelectorAll(".hello, .failed").forEach((element) => element.remove());
  const at = messages.length;
  const block = make("div", { class: "turn", "data-turn": `${at}` });
  for (const message of added) {
    const who = message.role === "tool" ? "result" : "you";
    block.append(make("div", { class: `message ${who}` }, message.content));
  }
  place.append(block);
  messages = [...messages, ...added];
  const own = new AbortController();
  running = own;
  showButtons();
  const answers = new Map();
  const answer = (index) => {
    if (!answers.has(index)) answers.set(index, new Answer(block));
    return answers.get(index);
  };
  answer(0);
  let isKept = true;
  try {
    await read(answer, own.signal);
    announce(`The answer is complete: ${answer(0).numTokens} tokens.`);
  } catch (error) {
    const isStop = error.name === "AbortError";
    if (isStop) answer(0).note("Stopped.");
    else answer(0).fail(error);
    isKept = Boolean(answer(0).text) && isStop;
  }
  if (running !== own) return;
  running = null;
  finishTurn(at, added, answer(0), isKept, block);
}

async function read(answer, signal) {
  const { path, body } = request(messages);
  let usage = null;
  for await (const chunk of stream(path, body, signal, (note) => answer(0).note(note))) {
    for (const choice of chunk.choices) answer(choice.index).push(choice);
    usage = chunk.usage ?? usage;
    scrollDown();
  }
  answer(0).finish(usage);
}

function finishTurn(at, added, answer, isKept, block) {
  if (isKept) {
    const reply = { role: "assistant", content: answer.text || null };
    if (answer.reasoning) reply.reasoning_content = answer.reasoning;
    const calls = answer.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
    if (calls.length) reply.tool_calls = calls;
    if (!reply.content && !calls.length && !answer.reasoning) reply.content = "";
    messages = [...messages, reply];
    if (calls.length) block.append(results(answer.calls));
  } else {
    messages = messages.slice(0, at);
    // So that it can be corrected and sent again.
    if (added[0].role === "user" && !byId("prompt").value) byId("prompt").value = added[0].content;
    block.classList.add("failed");
  }
  showButtons();
  scrollDown();
}

// Boxes for what the called functions return, which the next turn gives to the model.
function results(calls) {
  const inputs = calls.map((call) => {
    const input = make("input", { "aria-label": `Result of ${call.name}` });
    return { call, input, label: make("label", {}, `Result of ${call.name} `, input) };
  });
  const form = make("form", { class: "results" }, ...inputs.map((one) => one.label));
  form.append(make("button", { type: "submit" }, "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    form.remove();
    turn(inputs.map(({ call, input }) => ({ role: "tool", tool_call_id: call.id, content: input.value })));
  });
  return form;
}

function showButtons() {
  byId("send").hidden = Boolean(running);
  byId("stop").hidden = !running;
  byId("again").hidden = Boolean(running) || !messages.length;
}

// Only where the reader is at the end already: who reads further up is left alone.
function scrollDown() {
  const page = document.documentElement;
  if (page.scrollHeight - page.scrollTop - page.clientHeight < 160) page.scrollTop = page.scrollHeight;
}

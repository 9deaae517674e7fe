// The settings panel: from its fields to the body of a request.

import { byId } from "./dom.js";

export class FieldError extends Error {}

const readers = {
  text: (text) => text,
  number: (text, name) => {
    const value = Number(text);
    if (!Number.isFinite(value)) throw new FieldError(`${name}: ${text} is not a number`);
    return value;
  },
  lines: (text) => text.split("\n").filter((line) => line !== ""),
  integers: (text, name) => text.split(/[\s,]+/).filter(Boolean).map((one) => readers.number(one, name)),
  json: (text, name) => parsed(text, name),
  // A tool's name stands for the object that names it.
  word: (text) =>
    ["auto", "none", "required"].includes(text) ? text : { type: "function", function: { name: text } },
};

export function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(`${name}: not valid JSON (${error.message})`);
  }
}

export function parsedObject(text, name) {
  const value = text.trim() ? parsed(text, name) : {};
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    throw new FieldError(`${name}: give a JSON object`);
  }
  return value;
}

function fields() {
  const found = {};
  for (const input of document.querySelectorAll("[data-field]")) {
    const name = input.dataset.field;
    if (input.type === "checkbox") {
      if (input.checked) found[name] = true;
      continue;
    }
    // The browser gives an empty text for what it cannot read as a number.
    if (input.validity.badInput) throw new FieldError(`${name}: not a number`);
    if (input.value.trim() === "") continue;
    const kind = input.dataset.as ?? (input.type === "number" ? "number" : "text");
    found[name] = readers[kind](kind === "lines" ? input.value : input.value.trim(), name);
  }
  return found;
}

function constraint() {
  const kind = byId("constraint-kind").value;
  const text = byId("constraint").value;
  switch (kind) {
    case "":
      return {};
    case "json_object":
      return { structured_outputs: { json_object: true } };
    case "json":
      return { structured_outputs: { json: parsed(text, "JSON schema") } };
    case "choice":
      return { structured_outputs: { choice: readers.lines(text) } };
    default:
      return { structured_outputs: { [kind]: text } };
  }
}

const chatOnly = ["enable_thinking", "reasoning_effort", "tools", "tool_choice", "parallel_tool_calls"];

// Path and body of a streamed request for these messages. Throws FieldError for a field that cannot be read.
export function request(messages) {
  const system = byId("system").value;
  const body = {
    ...fields(),
    ...constraint(),
    stream: true,
    stream_options: { include_usage: true, include_passes: true },
    ...parsedObject(byId("extra").value, "Further fields"),
  };
  // Without tools the server refuses what only describes how to call them.
  if (!body.tools) for (const name of ["tool_choice", "parallel_tool_calls"]) delete body[name];
  if (byId("prompt-kind").value === "text") {
    for (const name of chatOnly) delete body[name];
    const prompt = messages.map((message) => message.content).join("");
    return { path: "v1/completions", body: { ...body, prompt: system + prompt } };
  }
  const first = system ? [{ role: "system", content: system }] : [];
  return { path: "v1/chat/completions", body: { ...body, messages: [...first, ...messages] } };
}

export function startSettings() {
  const kind = byId("constraint-kind");
  kind.addEventListener("change", () => {
    const names = { json: "JSON schema", regex: "Regex", choice: "Choices, one a line", grammar: "Grammar (Lark)" };
    byId("constraint-box").hidden = !(kind.value in names);
    byId("constraint-box").firstElementChild.textContent = names[kind.value] ?? "";
  });
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
  // On a phone the panel lies above the chat, so it begins folded.
  if (matchMedia("(max-width: 60rem)").matches) byId("settings-fold").open = false;
}

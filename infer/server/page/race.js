// The same prompt twice. One after the other, each run has the server to itself, and the replay shows both at
// the times that were measured. At once, they share every pass of the server, which the speeds then say little of.

import { Answer } from "./answer.js";
import { stream } from "./api.js";
import { differences } from "./diff.js";
import { announce, byId, make, rounded } from "./dom.js";
import { parsedObject, request } from "./settings.js";

const OWN = "own";
let sides = [];
let running = null;
let isAlone = true;

export function startRace() {
  sides = [...document.querySelectorAll(".side")].map((place) => {
    place.append(byId("side").content.cloneNode(true));
    const [preset, own] = [place.querySelector(".preset"), place.querySelector(".own")];
    preset.addEventListener("change", () => {
      own.hidden = preset.value !== OWN;
    });
    return { preset, own, fields: place.querySelector(".fields"), place: place.querySelector(".answer-place") };
  });
  setPresets(null);
  byId("race-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running && byId("race-prompt").value.trim()) race();
  });
  byId("race-prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("race-form").requestSubmit();
  });
  byId("race-stop").addEventListener("click", stopRace);
  byId("replay").addEventListener("click", replay);
}

// What a side may be, given the server's engine. A request of decoder isd may take one token per pass.
export function setPresets(engine) {
  const isIsd = engine?.decoder === "isd";
  const options = isIsd
    ? [
        ["AR: one token per pass", '{"decoder_options": {"stride": 1}}'],
        [`ISD: up to ${engine.stride} tokens per pass`, "{}"],
      ]
    : [[`as the server decodes${engine ? ` (${engine.decoder})` : ""}`, "{}"]];
  options.push(["other settings …", OWN]);
  sides.forEach(({ preset, own }, index) => {
    preset.replaceChildren(...options.map(([text, value]) => new Option(text, value)));
    preset.selectedIndex = index;
    own.hidden = preset.value !== OWN;
  });
}

export function offerPrompt(text) {
  byId("race-prompt").value ||= text;
}

export function stopRace() {
  running?.abort();
}

function bodyOf({ preset, fields }, index, prompt) {
  const { path, body } = request([{ role: "user", content: prompt }]);
  const text = preset.value === OWN ? fields.value : preset.value;
  const given = parsedObject(text, index ? "Right side" : "Left side");
  const decoder_options = { ...body.decoder_options, ...given.decoder_options };
  const merged = { ...body, ...given, n: 1 };
  if (Object.keys(decoder_options).length) merged.decoder_options = decoder_options;
  return { path, body: merged };
}

async function race() {
  const prompt = byId("race-prompt").value;
  running = new AbortController();
  byId("verdict").textContent = "";
  document.querySelector("#race .examples").hidden = true;
  showButtons();
  sides.forEach((side) => {
    side.place.replaceChildren();
    side.answer = null;
    side.record = [];
  });
  try {
    // Both are read first: a field that is wrong stops the race before it begins.
    const calls = sides.map((side, index) => bodyOf(side, index, prompt));
    isAlone = byId("race-order").value === "alone";
    if (!isAlone) {
      await Promise.all(sides.map((side, index) => run(side, calls[index])));
    } else {
      byId("verdict").textContent = "The left side runs, then the right one.";
      for (const [index, side] of sides.entries()) await run(side, calls[index]);
    }
    judge();
  } catch (error) {
    const isStop = error.name === "AbortError";
    running.abort();
    // What a side shows itself needs no second mention.
    const words = isStop ? "Stopped." : error.isShown ? "" : error.message;
    byId("verdict").replaceChildren(make("span", { class: isStop ? false : "error" }, words));
  }
  running = null;
  showButtons();
}

async function run(side, { path, body }) {
  const answer = new Answer(side.place);
  side.answer = answer;
  try {
    let usage = null;
    for await (const chunk of stream(path, body, running.signal, (note) => answer.note(note))) {
      const at = performance.now();
      for (const choice of chunk.choices) {
        side.record.push({ at: at - answer.startedAt, choice });
        answer.push(choice, at);
      }
      usage = chunk.usage ?? usage;
    }
    answer.finish(usage);
  } catch (error) {
    if (error.name !== "AbortError") {
      answer.fail(error);
      error.isShown = true;
    }
    throw error;
  }
}

function whole(answer) {
  return answer.text + answer.calls.map((call) => `${call.name}${call.arguments}`).join("");
}

function judge() {
  const [left, right] = sides.map((side) => side.answer);
  const isSame = whole(left) === whole(right) && left.reasoning === right.reasoning;
  const [marksLeft, marksRight] = differences(left.text, right.text);
  left.mark(marksLeft);
  right.mark(marksRight);
  const parts = [isSame ? "The answers are the same." : "The answers differ where they are marked."];
  const perPass = rounded(right.tokensPerPass / left.tokensPerPass, 2);
  const speed = rounded(right.speed / left.speed, 2);
  const rest = isAlone ? `and ${speed} times the speed` : "and shared its passes with the left one";
  parts.push(`The right side has ${perPass} times the tokens per forward ${rest}.`);
  byId("verdict").textContent = parts.join(" ");
  byId("verdict").dataset.same = `${isSame}`;
  announce(byId("verdict").textContent);
}

// Both sides from the start, at the times that were measured.
async function replay() {
  const records = sides.map((side) => side.record);
  running = new AbortController();
  const { signal } = running;
  showButtons();
  const start = performance.now();
  const plays = sides.map(async (side, index) => {
    side.place.replaceChildren();
    const answer = new Answer(side.place);
    side.answer = answer;
    answer.startedAt = start;
    for (const { at, choice } of records[index]) {
      const wait = start + at - performance.now();
      if (wait > 0 && !signal.aborted) await new Promise((resolve) => setTimeout(resolve, wait));
      answer.push(choice, start + at);
    }
    answer.finish(null);
  });
  await Promise.all(plays);
  running = null;
  judge();
  showButtons();
}

function showButtons() {
  byId("race-start").hidden = Boolean(running);
  byId("race-stop").hidden = !running;
  byId("replay").hidden = Boolean(running) || !sides.every((side) => side.answer?.finishReason);
}

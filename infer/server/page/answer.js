// One answer as it comes: its text with the tokens of a pass in one colour, its calls, and its figures.

import { make, rounded, showAcceptance } from "./dom.js";

const NUM_COLOURS = 6;

export class Answer {
  constructor(place) {
    this.pieces = [];
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.finishReason = null;
    this.numTokens = 0;
    this.numPasses = 0;
    this.accepted = [];
    this.tested = [];
    this.usage = null;
    this.startedAt = performance.now();
    this.firstAt = null;
    this.lastAt = null;
    this.firstTokens = 0;
    this.colour = 0;

    this.thought = make("details", { class: "thought", hidden: true }, make("summary", {}, "Reasoning"));
    this.thoughtText = make("div", { class: "text" });
    this.thought.append(this.thoughtText);
    this.textPlace = make("div", { class: "text", "data-answer": true });
    this.callPlace = make("div", { class: "calls" });
    this.notes = make("div", { class: "notes" });
    this.figures = make("p", { class: "figures" });
    this.bars = make("div", { class: "acceptance", "aria-label": "Acceptance by position" });
    this.element = make(
      "div",
      { class: "answer" },
      this.thought,
      this.textPlace,
      this.callPlace,
      this.notes,
      this.figures,
      this.bars,
    );
    place.append(this.element);
  }

  // A choice of a chunk, at a time in milliseconds: the page's own, or that of a replay.
  push(choice, at = performance.now()) {
    const passes = choice.passes ?? [];
    for (const pass of passes) this.count(pass);
    if (passes.length && this.firstAt === null) {
      this.firstAt = at;
      this.firstTokens = this.numTokens;
    }
    if (passes.length) this.lastAt = at;
    const delta = choice.delta ?? { content: choice.text };
    const kind = this.kind(passes);
    if (delta.reasoning_content) {
      this.reasoning += delta.reasoning_content;
      this.thought.hidden = false;
      this.thoughtText.append(shown({ text: delta.reasoning_content, ...kind }));
    }
    if (delta.content) {
      const piece = { text: delta.content, ...kind };
      this.text += delta.content;
      this.pieces.push(piece);
      this.textPlace.append(shown(piece));
    }
    for (const call of delta.tool_calls ?? []) this.pushCall(call);
    this.finishReason = choice.finish_reason ?? this.finishReason;
    this.showFigures();
  }

  count({ tokens, accepted, tested }) {
    this.numTokens += tokens;
    this.numPasses += 1;
    for (let position = 0; position < tested; position += 1) {
      this.tested[position] = (this.tested[position] ?? 0) + 1;
      this.accepted[position] = (this.accepted[position] ?? 0) + (position < accepted ? 1 : 0);
    }
  }

  // Class and title of what a chunk shows. A busy server may send several passes in one chunk.
  kind(passes) {
    const numTokens = passes.reduce((sum, pass) => sum + pass.tokens, 0);
    if (passes.length > 1) {
      return { className: "pass several", title: `${numTokens} tokens of ${passes.length} passes` };
    }
    if (numTokens < 2) return { className: "", title: "" };
    this.colour = (this.colour + 1) % NUM_COLOURS;
    const [{ accepted, tested }] = passes;
    const drafts = tested ? `, ${accepted} of ${tested} drafts accepted` : "";
    return {
      className: `pass p${this.colour}`,
      title: `pass ${this.numPasses}: ${numTokens} tokens${drafts}`,
    };
  }

  pushCall(call) {
    const known = (this.calls[call.index] ??= { id: call.id, name: "", arguments: "" });
    known.name += call.function.name ?? "";
    known.arguments += call.function.arguments ?? "";
    this.callPlace.replaceChildren(
      ...this.calls.map(({ name, arguments: given }) => make("pre", { class: "call" }, `${name}(${pretty(given)})`)),
    );
  }

  finish(usage) {
    this.usage = usage ?? null;
    if (!this.text && !this.calls.length && !this.reasoning) this.note("The answer is empty.");
    if (this.finishReason === "length") this.note("The answer was cut off: max_tokens, or the end of the context.");
    this.showFigures();
  }

  note(text) {
    this.notes.append(make("p", { class: "hint" }, text));
  }

  fail(error) {
    this.notes.append(make("p", { class: "error", role: "alert" }, error.message));
  }

  get secondsToFirst() {
    return this.firstAt === null ? null : (this.firstAt - this.startedAt) / 1000;
  }

  // Tokens a second after the first chunk: what comes before it is the prompt's time.
  get speed() {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return seconds > 0 ? (this.numTokens - this.firstTokens) / seconds : NaN;
  }

  get tokensPerPass() {
    return this.numPasses ? this.numTokens / this.numPasses : NaN;
  }

  showFigures() {
    const words = [
      ["tokens", this.numTokens],
      ["passes", this.numPasses],
      ["tokens per forward", rounded(this.tokensPerPass, 2)],
      ["tokens/s", rounded(this.speed, 1)],
      ["s to the first", rounded(this.secondsToFirst ?? NaN, 2)],
    ];
    this.figures.replaceChildren(
      ...words.map(([name, value]) => make("span", {}, make("b", { "data-figure": name }, `${value}`), ` ${name}`)),
    );
    showAcceptance(this.bars, this.accepted, this.tested);
  }

  // Mark ranges of the text, each [start, end), without losing the colours of passes.
  mark(ranges) {
    const parts = [];
    let offset = 0;
    for (const piece of this.pieces) {
      for (const [text, isMarked] of split(piece.text, offset, ranges)) {
        const part = shown({ ...piece, text });
        parts.push(isMarked ? make("mark", {}, part) : part);
      }
      offset += piece.text.length;
    }
    this.textPlace.replaceChildren(...parts);
  }
}

function shown({ text, className, title }) {
  return className ? make("span", { class: className, title }, text) : document.createTextNode(text);
}

function* split(text, offset, ranges) {
  let at = 0;
  for (const [start, end] of ranges) {
    const from = Math.min(Math.max(start - offset, at), text.length);
    const to = Math.min(Math.max(end - offset, at), text.length);
    if (from > at) yield [text.slice(at, from), false];
    if (to > from) yield [text.slice(from, to), true];
    at = Math.max(at, to);
  }
  if (at < text.length) yield [text.slice(at), false];
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

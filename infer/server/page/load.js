// The server's load, from /metrics, once a second while it is looked at.

import { ApiError, getText } from "./api.js";
import { byId, make, rounded, showAcceptance } from "./dom.js";

const PERIOD = 1000;
const NUM_POINTS = 120;
const points = [];
let timer = null;
let before = null;

export function showLoad(isShown) {
  clearInterval(timer);
  timer = null;
  before = null;
  if (!isShown) return;
  look();
  timer = setInterval(look, PERIOD);
}

// Samples of the text format: each has a name, labels and a value.
export function samples(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const match = /^([\w:]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries(
      [...(match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((pair) => [pair[1], pair[2]]),
    );
    found.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return found;
}

function total(all, name) {
  return all.filter((one) => one.name === name).reduce((sum, one) => sum + one.value, 0);
}

function byPosition(all, name) {
  const found = [];
  for (const one of all.filter((each) => each.name === name)) found[Number(one.labels.position)] = one.value;
  return found;
}

async function look() {
  try {
    const all = samples(await getText("metrics"));
    const now = performance.now();
    show(all, now);
    byId("load-state").textContent = "";
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    byId("load-state").replaceChildren(make("span", { class: "error" }, error.message));
    before = null;
    // One dialog for the key is enough; the page looks again when it has one.
    if (error.status === 401) showLoad(false);
  }
}

function show(all, now) {
  const tokens = total(all, "vllm:generation_tokens_total");
  if (before) {
    points.push((tokens - before.tokens) / ((now - before.now) / 1000));
    if (points.length > NUM_POINTS) points.shift();
    drawLine();
  }
  before = { tokens, now };
  const cache = all.find((one) => one.name === "vllm:cache_config_info");
  const numPages = Number(cache?.labels.num_gpu_blocks ?? NaN);
  const share = total(all, "vllm:kv_cache_usage_perc");
  const accepted = total(all, "vllm:spec_decode_num_accepted_tokens_total");
  const tested = total(all, "vllm:spec_decode_num_draft_tokens_total");
  const first = total(all, "vllm:time_to_first_token_seconds_sum") / total(all, "vllm:time_to_first_token_seconds_count");
  const looked = total(all, "vllm:prefix_cache_queries_total");
  const cards = {
    running: total(all, "vllm:num_requests_running"),
    waiting: total(all, "vllm:num_requests_waiting"),
    "tokens/s": points.length ? rounded(points.at(-1), 1) : "–",
    "acceptance": tested ? `${rounded((100 * accepted) / tested, 1)} %` : "–",
    "KV pages in use": Number.isFinite(numPages) ? `${Math.round(share * numPages)} of ${numPages}` : "–",
    "s to the first token, mean": rounded(first, 3),
    "prompt tokens": total(all, "vllm:prompt_tokens_total"),
    "prompt tokens cached": looked ? `${rounded((100 * total(all, "vllm:prefix_cache_hits_total")) / looked, 0)} %` : "–",
    "tokens emitted": tokens,
    "forward passes of finished answers": total(all, "idlm:request_forwards_total"),
    "engine restarts": total(all, "idlm:engine_restarts_total"),
  };
  byId("cards").replaceChildren(
    ...Object.entries(cards).map(([name, value]) =>
      make("div", {}, make("dt", {}, name), make("dd", { "data-card": name }, `${value}`)),
    ),
  );
  showAcceptance(
    byId("load-acceptance"),
    byPosition(all, "vllm:spec_decode_num_accepted_tokens_per_pos_total"),
    byPosition(all, "idlm:spec_decode_num_draft_tokens_per_pos_total"),
  );
  const finished = all.filter((one) => one.name === "vllm:request_success_total");
  byId("finished").tBodies[0].replaceChildren(
    ...finished.map((one) =>
      make("tr", {}, make("td", {}, one.labels.finished_reason), make("td", {}, `${one.value}`)),
    ),
  );
}

function drawLine() {
  const most = Math.max(1, ...points);
  const step = 600 / (NUM_POINTS - 1);
  const path = points.map((value, index) => `${(index * step).toFixed(1)},${(118 - (114 * value) / most).toFixed(1)}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", path.join(" "));
  byId("speed-line").replaceChildren(line);
  byId("speed-range").textContent = `The last ${points.length} s; the top of the plot is ${rounded(most, 0)} tokens/s.`;
}

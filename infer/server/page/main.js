// The page's frame: tabs, colours, the key, and what the server describes of its model.

import { ApiError, getJson, setKey } from "./api.js";
import { firstPrompt, startChat, stop } from "./chat.js";
import { byId, make } from "./dom.js";
import { showLoad } from "./load.js";
import { offerPrompt, setPresets, startRace, stopRace } from "./race.js";
import { startSettings } from "./settings.js";

const TABS = ["chat", "race", "load"];
const THEMES = { "": "as the system", light: "light", dark: "dark" };
const RETRY = 2000;
const EXAMPLES = [
  // For the small models that come with idlm, which know such questions alone.
  "Mia has 5 nuts. Mia breaks 2. Mia picks 1. Mia uses 4. Mia earns 6. How many nuts does Mia have?",
  "Write the numbers from 1 to 30, with commas between.",
  "Write a function in Python that checks whether a year is a leap year.",
];

function select(name) {
  for (const each of TABS) {
    const isShown = each === name;
    byId(each).hidden = !isShown;
    byId(`tab-${each}`).setAttribute("aria-selected", `${isShown}`);
    // One stop of the Tab key for all tabs; arrows move between them.
    byId(`tab-${each}`).tabIndex = isShown ? 0 : -1;
  }
  byId("settings").hidden = name === "load";
  if (name === "race") offerPrompt(firstPrompt());
  showLoad(name === "load");
}

function startTabs() {
  TABS.forEach((name, index) => {
    const tab = byId(`tab-${name}`);
    tab.addEventListener("click", () => select(name));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = TABS[(index + step + TABS.length) % TABS.length];
      select(next);
      byId(`tab-${next}`).focus();
    });
  });
}

function startExamples() {
  for (const line of document.querySelectorAll(".examples")) {
    const target = byId(line.dataset.for);
    for (const text of EXAMPLES) {
      const button = make("button", { type: "button", class: "quiet" }, text);
      button.addEventListener("click", () => {
        target.value = text;
        target.form.requestSubmit();
      });
      line.append(button);
    }
  }
}

function startTheme() {
  const names = Object.keys(THEMES);
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const next = names[(names.indexOf(root.dataset.theme ?? "") + 1) % names.length];
    if (next) root.dataset.theme = next;
    else delete root.dataset.theme;
    byId("theme").setAttribute("aria-label", `Colours: ${THEMES[next]}`);
    byId("theme").title = `Colours: ${THEMES[next]}`;
  });
}

function startKey() {
  const dialog = byId("key-dialog");
  byId("key-button").addEventListener("click", () => askForKey(""));
  byId("key-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    byId("key").value = "";
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    // Headers hold nothing else, and the browser's own words for that are hard to read.
    if (/[^\x20-\x7e]/.test(byId("key").value)) {
      askForKey("A key has only letters, digits and signs of ASCII.");
      return;
    }
    setKey(byId("key").value);
    dialog.close();
    connect();
  });
}

function askForKey(message) {
  byId("key-error").textContent = message;
  byId("key-error").hidden = !message;
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

async function connect() {
  try {
    const { engine, served_model_name: name, status } = await getJson("server_info");
    if (status !== "ready") throw new ApiError(503, `${name}: ${status} …`);
    const stride = engine.stride > 1 ? `, up to ${engine.stride} tokens per pass` : "";
    const tokenizer = await getJson("tokenizer_info");
    const hasChats = Boolean(tokenizer?.chat_template);
    if (!hasChats) byId("prompt-kind").value = "text";
    const kind = hasChats ? "" : ", no chat template: text is continued";
    byId("model").textContent = `${name}: decoder ${engine.decoder}${stride}, ${engine.exactness}${kind}`;
    setPresets(engine);
    showLoad(!byId("load").hidden);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    byId("model").textContent = error.message;
    // It is not there yet, or loads its model.
    if (error.status === 0 || error.status === 503) setTimeout(connect, RETRY);
  }
}

// A key may be revoked while the page is open.
addEventListener("refused", () => askForKey("The server needs a key, or another one."));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("key-dialog").open) return;
  stop();
  stopRace();
});
startTabs();
startTheme();
startKey();
startSettings();
startExamples();
startChat();
startRace();
connect();

// Calls of the server. All addresses are relative, so that the page works behind a proxy that adds a path.

// In this module alone: neither storage nor cookies nor the document ever hold the key.
let key = "";

export function setKey(value) {
  key = value.trim();
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...options.headers, ...headers() } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (response.status === 401) dispatchEvent(new Event("refused"));
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const text = await response.text();
  let message = text.slice(0, 500) || response.statusText;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // A proxy answers with a page of its own.
  }
  return new ApiError(response.status, message);
}

export async function getJson(path) {
  return (await call(path)).json();
}

export async function getText(path) {
  return (await call(path)).text();
}

// The chunks of a streamed answer. `onNote` gets what the server does not enforce, if anything.
export async function* stream(path, body, signal, onNote = () => {}) {
  const response = await call(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const note = response.headers.get("warning");
  if (note) onNote(note.replace(/^299 idlm /, ""));
  let isDone = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      isDone = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk.error.message);
    yield chunk;
  }
  if (!isDone) throw new ApiError(0, "The stream ended before the answer did.");
}

// The data of server-sent events. Each of the server's events is one `data:` line and an empty one.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice("data: ".length);
      }
    }
  } finally {
    // A reader that stops early ends the request, so that the server stops as well.
    reader.cancel().catch(() => {});
  }
}

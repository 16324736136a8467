// The page of `anybit serve`: a conversation at any width, or one prompt at two widths side by side.
"use strict";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"];

let card = null; // the model, as /v1/models has it
let panes = [];

// ---- the server

let key = sessionStorage.getItem("key");

async function ask(path, body, signal) {
  for (;;) {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers });
    if (response.status === 401) {
      await askForKey();
      continue;
    }
    if (!response.ok) {
      const found = await response.json().catch(() => ({}));
      const error = new Error(found.error?.message ?? `the server answers ${response.status}`);
      error.status = response.status;
      throw error;
    }
    return response;
  }
}

let asking = null; // one dialog for all requests that wait for it

function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = $("key");
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => {
      key = $("secret").value.trim();
      sessionStorage.setItem("key", key);
      $("secret").value = "";
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue; // a comment: the server is alive
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function connect() {
  try {
    card = (await (await ask("v1/models")).json()).data[0];
  } catch (error) {
    $("model").textContent = error.status === 503 ? "the model is loading" : "the server does not answer";
    $("model").classList.toggle("bad", error.status !== 503);
    setTimeout(connect, 1000);
    return;
  }
  document.title = `${card.id} – anybit`;
  if (card.dimensions) {
    $("model").textContent = `${card.id} is an encoder: it embeds texts at /v1/embeddings and does not chat`;
    for (const part of document.querySelectorAll("nav, #composer, #keys")) part.hidden = true;
    return;
  }
  const kind = card.chat ? "" : ", continues texts";
  $("model").textContent = `${card.id}, context ${card.max_model_len.toLocaleString()} tokens${kind}`;
  $("model").classList.remove("bad");
  panes.push(new Pane(0.5));
  $("prompt").dispatchEvent(new Event("input"));
}

// ---- a pane: a width and its conversation

class Pane {
  constructor(share) {
    this.element = $("pane").content.firstElementChild.cloneNode(true);
    this.part = (name) => this.element.querySelector(`.${name}`);
    const widths = card.levels.map((level) => level.bits);
    this.slider = this.part("slider");
    this.automatic = this.element.querySelector(".auto input");
    this.slider.min = widths[0];
    this.slider.max = widths.at(-1);
    this.slider.value = widths[0] + share * (widths.at(-1) - widths[0]);
    this.slider.addEventListener("input", () => this.showWidth());
    this.slider.addEventListener("keydown", (event) => this.step(event));
    this.automatic.addEventListener("change", () => this.showWidth());
    if (widths.length === 1) this.part("slider").hidden = this.part("auto").hidden = true;
    this.messages = [];
    this.stop = null; // of the answer that is on its way
    this.tokens = 0; // that the cache holds
    $("panes").append(this.element);
    this.showWidth();
  }

  // The widest level up to the slider's place, which is the level that the server takes, too.
  get level() {
    const fits = card.levels.filter((level) => level.bits <= Number(this.slider.value) + 1e-6);
    return fits.at(-1) ?? card.levels[0];
  }

  // Arrow keys go from level to level, whatever the slider's step.
  step(event) {
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = card.levels[card.levels.indexOf(this.level) + by];
    if (next) this.slider.value = next.bits;
    this.showWidth();
  }

  showWidth(served) {
    const automatic = this.automatic.checked;
    this.slider.disabled = automatic;
    const bits = served ?? (automatic ? null : this.level.bits);
    this.part("bits").replaceChildren(bits === null ? "auto" : bits.toFixed(2), small(bits === null ? "" : " bits"));
    this.slider.setAttribute("aria-valuetext", `${this.level.bits.toFixed(2)} bits`);
    const level = bits === null ? card.levels.at(-1) : nearest(bits);
    this.part("read").textContent = level.bytes_per_token ? bytes(level.bytes_per_token) : "–";
    const cache = this.tokens * card.kv_bytes_per_token;
    const weights = card.levels.at(-1).bytes_per_token;
    this.part("memory").textContent = `${weights ? bytes(weights) : "–"} + ${bytes(cache)}`;
  }

  // Answers once `before` has, so that each width has the machine for itself and its figures are its own.
  async answer(prompt, settings, before) {
    this.stop = new AbortController();
    this.say("user", prompt);
    const turn = this.say("assistant waiting", "");
    await before;
    turn.className = "turn assistant running";
    const asked = { stream: true, stream_options: { include_usage: true }, ...settings.numbers };
    if (card.levels.length > 1) asked.bits = this.automatic.checked ? "auto" : this.level.bits;
    const messages = this.messages; // of this conversation, also when another has begun
    if (card.chat) {
      messages.push({ role: "user", content: prompt });
      asked.messages = settings.system ? [{ role: "system", content: settings.system }, ...messages] : messages;
    } else {
      asked.prompt = prompt;
    }
    let text = "";
    try {
      text = await this.read(turn, await ask(card.chat ? "v1/chat/completions" : "v1/completions", asked, this.stop.signal));
    } catch (error) {
      this.stop.abort(); // the server need not go on
      text = turn.said ?? "";
      this.show(turn);
      if (error.name !== "AbortError") {
        this.say("error", error.message);
        if (!text && !turn.thought) turn.remove();
      }
    }
    this.stop = null;
    turn.classList.remove("running");
    if (card.chat && (text || turn.thought)) messages.push({ role: "assistant", content: text });
    else if (card.chat) messages.pop();
  }

  async read(turn, response) {
    const asked = performance.now();
    let first = null, count = 0, timings = null, usage = null;
    turn.said = turn.thought = "";
    for await (const event of eventsOf(response)) {
      usage = event.usage ?? usage;
      timings = event.timings ?? timings;
      const choice = event.choices[0];
      const thought = choice?.delta?.reasoning_content ?? "";
      const piece = choice?.delta?.content ?? choice?.text ?? "";
      if (!thought && !piece) continue;
      const now = performance.now();
      if (first === null) {
        first = now;
        this.part("first").textContent = `${Math.round(now - asked)} ms`;
      }
      turn.thought += thought;
      turn.said += piece;
      turn.frame ??= requestAnimationFrame(() => this.show(turn)); // drawing takes time from the engine
      if (count++ && now - first > 100) this.part("rate").textContent = ((count - 1) / (now - first) * 1000).toFixed(1);
    }
    this.show(turn);
    this.finish(turn, timings, usage);
    return turn.said;
  }

  finish(turn, timings, usage) {
    if (usage) this.tokens = usage.total_tokens;
    if (!timings?.bits) return;
    if (timings.decode_tokens_per_second) this.part("rate").textContent = timings.decode_tokens_per_second.toFixed(1);
    this.part("first").textContent = `${Math.round((timings.queue_seconds + timings.prefill_seconds) * 1000)} ms`;
    const { min, mean, max } = timings.bits;
    this.showWidth(this.automatic.checked ? mean : undefined);
    const range = max - min > 0.005 ? `${min.toFixed(2)} to ${max.toFixed(2)}` : mean.toFixed(2);
    const cached = usage?.prompt_tokens_details.cached_tokens ? `, ${usage.prompt_tokens_details.cached_tokens} of the prompt cached` : "";
    const made = document.createElement("span");
    made.className = "made";
    made.textContent = `${usage?.completion_tokens ?? "?"} tokens at ${range} bits${cached}`;
    turn.append(made);
  }

  say(kind, text) {
    const turn = document.createElement("div");
    turn.className = `turn ${kind}`;
    turn.said = text;
    this.part("talk").append(turn);
    this.show(turn, true);
    return turn;
  }

  // Text with fenced code set apart; follows the end unless the reader has scrolled away from it.
  show(turn, always = false) {
    cancelAnimationFrame(turn.frame);
    turn.frame = null;
    const talk = this.part("talk");
    const follows = always || talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
    const parts = turn.said.split(/```[^\n`]*\n?/);
    turn.replaceChildren(...parts.map((part, i) => (i % 2 ? code(part) : document.createTextNode(part))));
    if (turn.thought) turn.prepend(thinking(turn.thought));
    if (follows) talk.scrollTop = talk.scrollHeight;
  }

  clear() {
    this.messages = [];
    this.tokens = 0;
    this.part("talk").replaceChildren();
    this.showWidth();
  }
}

function nearest(bits) {
  return card.levels.reduce((best, level) => (Math.abs(level.bits - bits) < Math.abs(best.bits - bits) ? level : best));
}

function bytes(count) {
  if (!count) return "0 MB";
  const [size, unit] = count < 1e9 ? [count / 1e6, "MB"] : [count / 1e9, "GB"];
  return `${size < 10 ? size.toFixed(1) : Math.round(size)} ${unit}`;
}

function small(text) {
  const element = document.createElement("small");
  element.textContent = text;
  return element;
}

function thinking(text) {
  const element = document.createElement("div");
  element.className = "thought";
  element.textContent = text;
  return element;
}

function code(text) {
  const element = document.createElement("pre");
  element.textContent = text;
  return element;
}

// ---- what people do

// What was typed, even where it is no number: the server says in words what is wrong with it.
function settings() {
  const given = NUMBERS.map((name) => [name, $(name).value.trim()]).filter(([, typed]) => typed !== "");
  const numbers = given.map(([name, typed]) => [name, Number.isFinite(Number(typed)) ? Number(typed) : typed]);
  return { system: $("system").value.trim(), numbers: Object.fromEntries(numbers) };
}

const running = () => panes.some((pane) => pane.stop);

function showButton() {
  $("send").textContent = running() ? "Stop" : "Send";
  $("send").disabled = !running() && (!card || !$("prompt").value.trim());
}

async function send() {
  const prompt = $("prompt").value.trim();
  if (!card || !prompt || running()) return;
  $("prompt").value = "";
  $("prompt").dispatchEvent(new Event("input"));
  const how = settings();
  let last = Promise.resolve();
  for (const pane of panes) last = pane.answer(prompt, how, last);
  showButton();
  await last;
  showButton();
}

function stop() {
  for (const pane of panes) pane.stop?.abort();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running()) stop();
  else send();
});
$("prompt").addEventListener("input", () => {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
  showButton();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
$("settings").addEventListener("click", () => {
  $("drawer").hidden = !$("drawer").hidden;
  $("settings").setAttribute("aria-expanded", String(!$("drawer").hidden));
});
$("clear").addEventListener("click", () => {
  stop();
  for (const pane of panes) pane.clear();
  $("prompt").focus();
});
$("compare").addEventListener("click", () => {
  if (!card || running()) return;
  const second = panes.length === 1;
  if (second) {
    panes.push(new Pane(0.05));
    panes[0].clear(); // both begin with the same prompt
  } else {
    panes.pop().element.remove();
  }
  $("compare").setAttribute("aria-pressed", String(second));
});

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

$("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", theme);
  setTheme(theme);
});
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => localStorage.getItem("theme") ?? setTheme(dark.matches ? "dark" : "light"));
setTheme(localStorage.getItem("theme") ?? (dark.matches ? "dark" : "light"));
connect();

// @ts-check
// The playground: a conversation with the model behind this server.

import { ask, RequestError } from "./api.js";
import { byId, make } from "./dom.js";
import { load, save } from "./kept.js";
import { showLegend } from "./origins.js";
import { Peek } from "./peek.js";
import { Settings } from "./settings.js";
import { Status } from "./status.js";
import { Turn } from "./turn.js";

/** @typedef {import("./api.js").Message} Message */
/** @typedef {import("./answer.js").Answer} Answer */

const PAINT_EVERY_MS = 60; // drawing takes time from a model on the same machine
const NEAR_PX = 40; // from the end of the page: there the page follows new text
const EXAMPLES = [
  "Tom has 3 apples and buys 4 more. How many apples has he?",
  "Omar buys 3 notebooks for $4 each and 5 pens for $2 each. How much does he pay?",
  "There are 5 shelves in a library with 32 books each. How many books are there in all?",
];

const talk = byId("talk", HTMLElement);
const intro = byId("intro", HTMLElement);
const question = byId("question", HTMLTextAreaElement);
const races = byId("races", HTMLInputElement);
const said = byId("said", HTMLElement);
const peek = new Peek(byId("peek", HTMLElement));
const settings = new Settings();
const status = new Status();
let method = "CARD";
/** @type {Turn[]} */
let turns = [];
/** @type {AbortController | null} */
let running = null;
let isFollowing = true; // scroll along with new text

/** @param {string} text */
async function submit(text) {
  if (running || !text.trim()) return;
  const controller = (running = new AbortController());
  const conversation = turns; // another one begins if this is cleared meanwhile
  const turn = new Turn(text, peek);
  document.body.dataset.busy = "true";
  intro.hidden = true;
  talk.append(turn.element);
  isFollowing = true;
  try {
    const fields = requestFor(text);
    conversation.push(turn);
    await (races.checked ? race(turn, fields, controller.signal) : single(turn, fields, controller.signal));
  } catch (error) {
    showError(error, turn);
  } finally {
    running = null;
    delete document.body.dataset.busy;
    keep();
    status.refresh();
  }
}

/**
 * @param {Turn} turn
 * @param {Record<string, unknown>} fields of the request
 * @param {AbortSignal} signal
 */
async function single(turn, fields, signal) {
  const answer = turn.add({ lane: "card", title: method });
  await run(answer, fields, signal);
  said.textContent = `${answer.state === "done" ? "The answer" : "Stopped"}: ${answer.content}`;
}

/**
 * @param {Turn} turn
 * @param {Record<string, unknown>} fields
 * @param {AbortSignal} signal
 */
async function race(turn, fields, signal) {
  const card = turn.add({ lane: "card", title: method });
  const plain = turn.add({ lane: "plain", title: "Plain decoding" });
  plain.wait("starts when the first has finished, so that neither slows the other");
  try {
    await run(card, fields, signal);
    if (!signal.aborted) await run(plain, { ...fields, speculation: "off" }, signal);
  } finally {
    if (plain.state === "waiting") plain.skip();
  }
  follow(() => {
    said.textContent = turn.judge();
  });
}

/** @param {string} text @returns {Record<string, unknown>} @throws {RequestError} for settings that cannot be sent */
function requestFor(text) {
  if (settings.fault) throw new RequestError(`${settings.fault} Mend it in the settings.`);
  /** @type {Message[]} */
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const turn of settings.sendsEarlier ? turns : []) {
    if (!turn.content) continue;
    messages.push({ role: "user", content: turn.question }, { role: "assistant", content: turn.content });
  }
  messages.push({ role: "user", content: text });
  const told = { stream: true, stream_options: { include_usage: true }, shows_tree: true, include_metrics: true };
  return { messages, ...settings.sampling, ...told };
}

/**
 * Let the model write one answer. A stop by the user counts as a normal end.
 * @param {Answer} answer
 * @param {Record<string, unknown>} fields
 * @param {AbortSignal} signal
 * @throws {RequestError}
 */
async function run(answer, fields, signal) {
  answer.start();
  const painting = setInterval(() => paint(answer), PAINT_EVERY_MS);
  try {
    for await (const pieces of ask(fields, settings.key, signal)) answer.take(pieces);
    answer.end("done");
  } catch (error) {
    answer.end(signal.aborted ? "stopped" : "failed");
    if (!signal.aborted) throw error;
  } finally {
    clearInterval(painting);
    follow(() => {});
  }
}

/** @param {Answer} answer */
function paint(answer) {
  follow(() => answer.paint());
}

/**
 * Change the page; a view at its end stays at the end, unless a token is shown.
 * @param {() => void} change
 */
function follow(change) {
  change();
  if (isFollowing && peek.element.hidden) scrollTo({ top: document.documentElement.scrollHeight });
}

/**
 * @param {unknown} error
 * @param {Turn} turn
 */
function showError(error, turn) {
  const message = error instanceof RequestError ? error.message : `The page itself failed: ${error}`;
  const buttons = [makeButton("Ask again", () => submit(turn.question))];
  if (error instanceof RequestError && error.status === 401) {
    buttons.unshift(makeButton("To the key", () => settings.askForKey()));
  }
  turn.tell(make("div", { class: "error", role: "alert" }, make("p", {}, message), ...buttons));
  follow(() => {});
}

function onScroll() {
  const { scrollHeight, clientHeight, scrollTop } = document.documentElement;
  isFollowing = scrollHeight - clientHeight - scrollTop < NEAR_PX;
}

function stop() {
  running?.abort();
}

function keep() {
  const told = turns.filter((turn) => turn.answers.some((answer) => answer.entries.length));
  save(settings.system, told.map((turn) => turn.keep()));
}

/** Show the conversation that was kept, if there is one. */
function restore() {
  const kept = load();
  if (!kept) return;
  try {
    const restored = kept.turns.map((turn) => Turn.from(turn, peek));
    talk.append(...restored.map((turn) => turn.element));
    turns = restored;
    settings.system = kept.system;
    intro.hidden = turns.length > 0;
    follow(() => {});
  } catch {
    save("", []); // the stored value is not ours
  }
}

function startNew() {
  stop();
  turns = [];
  keep();
  for (const turn of talk.querySelectorAll(".turn")) turn.remove();
  peek.hide();
  intro.hidden = false;
  question.focus();
}

function send() {
  const text = question.value;
  if (running || !text.trim()) return;
  question.value = "";
  submit(text);
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  if (event.key !== "Escape" || event.isComposing) return;
  peek.hide();
  stop();
  if (settings.isOpen) settings.open(false);
}

/** @param {KeyboardEvent} event */
function onQuestionKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
}

/** @param {string} text @param {() => void} press */
function makeButton(text, press) {
  const button = make("button", { type: "button" }, text);
  button.addEventListener("click", press);
  return button;
}

function showExamples() {
  const buttons = EXAMPLES.map((text) => make("li", {}, makeButton(text, () => submit(text))));
  byId("examples", HTMLElement).append(...buttons);
}

function listen() {
  byId("ask", HTMLFormElement).addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  question.addEventListener("keydown", onQuestionKey);
  byId("stop", HTMLButtonElement).addEventListener("click", stop);
  byId("new", HTMLButtonElement).addEventListener("click", startNew);
  document.addEventListener("keydown", onKey);
  addEventListener("scroll", onScroll, { passive: true });
  addEventListener("pagehide", () => running && keep()); // keeps the part of an unfinished answer
}

async function begin() {
  showLegend(byId("legend", HTMLElement));
  showExamples();
  listen();
  restore();
  if (matchMedia("(hover: hover)").matches) question.focus(); // elsewhere a keyboard would cover half of the page
  const served = await status.served();
  if (served) method = served.method === "card" ? "CARD" : served.method;
  const isDemo = served?.model === "demo-target";
  byId("about-demo", HTMLElement).hidden = !isDemo;
  if (isDemo) {
    settings.sendsEarlier = false;
    question.placeholder = "A word problem, for example";
  }
  await status.refresh();
}

begin();

// @ts-check
// One answer as it is written: tinted tokens or formatted text, timeline, figures.

import { Aligner } from "./align.js";
import { CodeFinder } from "./code.js";
import { copyButton } from "./copy.js";
import { duration, make } from "./dom.js";
import { Figures } from "./figures.js";
import { formatted } from "./markdown.js";
import { originOf } from "./origins.js";
import { Rounds } from "./rounds.js";
import { read, write } from "./storage.js";
import { Strip } from "./strip.js";

/** @typedef {import("./api.js").Piece} Piece */
/** @typedef {import("./api.js").Metrics} Metrics */
/** @typedef {import("./align.js").Aligned} Aligned */
/** @typedef {{aligned: Aligned, element: HTMLElement, roundIdx: number}} Entry */
/** @typedef {"waiting" | "writing" | "done" | "stopped" | "failed" | "skipped"} State */
/** @typedef {{lane: "card" | "plain", title: string}} Heading */
/** @typedef {Heading & {state: State, steps: [number, Piece[]][]}} KeptAnswer */

const VIEW_AT = "card.view"; // "formatted" if finished answers are to be shown so
const STATES = {
  waiting: "waiting",
  writing: "writing",
  done: "done",
  stopped: "stopped",
  failed: "failed",
  skipped: "not run",
};

/** An answer, from sending the question to its end. */
export class Answer {
  rounds = new Rounds();
  /** @type {Entry[]} */
  entries = [];
  /** @type {Metrics | null} */
  metrics = null;
  /** @type {State} */
  state = "waiting";
  endMs = NaN;
  #aligner = new Aligner();
  #code = new CodeFinder();
  #sentAt = NaN;
  /** @type {[number, Piece[]][]} pieces with their times, enough to show the answer again */
  #steps = [];
  /** @type {string | null} */
  #finishReason = null;
  #roundIdx = 0; // of the next token
  #numShown = 0;
  #figures = new Figures();
  #stateLine = make("span", { class: "state" });
  #toggle = make("button", { type: "button", class: "small", "aria-pressed": "false" }, "Formatted");
  /** @type {HTMLElement | null} */
  #formatted = null;
  /** @type {HTMLDetailsElement | null} what the model thinks before its answer, folded once that begins */
  #thoughts = null;

  /**
   * @param {import("./strip.js").Scale} scale
   * @param {import("./peek.js").Peek} peek
   * @param {Heading} heading
   */
  constructor(scale, peek, { lane, title }) {
    this.lane = lane;
    this.title = title;
    this.strip = new Strip(scale);
    this.peek = peek;
    this.text = make("div", { class: "text", role: "group", "aria-label": `${title}: the answer` });
    const tools = make("div", { class: "tools" }, this.#toggle, copyButton("the answer", () => this.content));
    const head = make("header", {}, make("h3", {}, title), this.#stateLine, tools);
    this.element = make("article", { class: "answer", "data-lane": lane }, head, this.text, this.strip.element);
    this.element.append(this.#figures.element);
    this.#toggle.addEventListener("click", () => this.#choose(this.text.hidden ? "tokens" : "formatted"));
    this.#listen();
    this.#become("waiting");
  }

  /** @param {string} note why it waits */
  wait(note) {
    this.#stateLine.textContent = note;
  }

  /** Show that it does not run at all. */
  skip() {
    this.#become("skipped");
  }

  start() {
    this.#sentAt = performance.now();
    this.#become("writing");
  }

  /**
   * @param {Piece[]} pieces that arrived together
   * @param {number} [atMs] when, after the sending of the question
   */
  take(pieces, atMs = this.#now()) {
    this.#steps.push([atMs, pieces]);
    const tokens = pieces.flatMap((piece) => piece.tokens);
    const isLast = pieces.some((piece) => piece.finishReason !== null);
    this.rounds.push(tokens, atMs, isLast);
    for (const piece of pieces) {
      this.#finishReason = piece.finishReason ?? this.#finishReason;
      this.metrics = piece.metrics ?? this.metrics;
      if (piece.thoughts) this.#think(piece.thoughts);
      if (piece.text && this.#thoughts) this.#thoughts.open = false;
      const thinking = piece.tokens.filter((token) => token.thinks);
      this.#roundIdx += thinking.filter((token) => originOf(token.origin).kind !== "accepted").length;
      const own = thinking.length ? piece.tokens.filter((token) => !token.thinks) : piece.tokens;
      this.#add(this.#aligner.push(piece.text, own, piece.finishReason !== null));
    }
  }

  /** @param {string} text */
  #think(text) {
    if (!this.#thoughts) {
      const summary = make("summary", {}, "Thoughts");
      this.#thoughts = /** @type {HTMLDetailsElement} */ (make("details", { class: "thoughts" }, summary));
      this.#thoughts.open = true;
      this.text.before(this.#thoughts);
    }
    this.#thoughts.append(text);
  }

  /** @param {Aligned[]} found */
  #add(found) {
    for (const aligned of found) {
      const element = tokenElement(aligned);
      element.classList.toggle("is-code", this.#code.push(aligned.text));
      this.entries.push({ aligned, element, roundIdx: this.#roundIdx });
      if (originOf(aligned.token.origin).kind !== "accepted") this.#roundIdx += 1;
    }
  }

  /**
   * @param {State} state
   * @param {number} [endMs] after the sending of the question
   */
  end(state, endMs = this.#now()) {
    this.endMs = endMs;
    this.#add(this.#aligner.push("", [], true));
    this.paint();
    this.text.append(this.#aligner.rest);
    this.#become(state);
    this.#figures.finish(this);
    const count = `${this.rounds.numTokens} token${this.rounds.numTokens === 1 ? "" : "s"}`;
    const hint = this.entries.length ? "; the arrow keys go from token to token" : "";
    this.text.setAttribute("aria-label", `The answer, ${count}${hint}`);
    if (this.content && read(() => localStorage, VIEW_AT) === "formatted") this.#show("formatted");
  }

  /** @returns {KeptAnswer} what `replay` needs */
  keep() {
    const state = this.state === "writing" ? "stopped" : this.state;
    return { lane: this.lane, title: this.title, state, steps: this.#steps };
  }

  /** @param {KeptAnswer} kept */
  replay({ state, steps }) {
    if (state === "skipped" || state === "waiting") return this.skip();
    this.#become("writing");
    for (const [atMs, pieces] of steps) this.take(pieces, atMs);
    this.end(state, this.rounds.lastMs);
  }

  /** Show new tokens since the last call. */
  paint() {
    const nowMs = Number.isNaN(this.endMs) ? this.#now() : this.endMs;
    const fresh = this.entries.slice(this.#numShown);
    this.#numShown = this.entries.length;
    this.text.append(...fresh.map((entry) => entry.element));
    if (fresh.length && fresh[0] === this.entries[0]) fresh[0].element.tabIndex = 0;
    if (this.state === "writing") this.#figures.update(this.rounds, nowMs);
    this.strip.draw(this.rounds, this.state === "writing" ? nowMs : this.rounds.lastMs || 0);
  }

  /** @returns {string} */
  get content() {
    return this.entries.map((entry) => entry.aligned.text).join("") + this.#aligner.rest;
  }

  /** @returns {number[]} */
  get tokenIds() {
    return this.entries.map((entry) => entry.aligned.token.token_id);
  }

  /** Tokens per second after the first: the server's figure if it has told it. */
  get tokensPerS() {
    return this.metrics?.tokens_per_second || this.rounds.tokensPerS;
  }

  /** Milliseconds after the first token: the server's figure if it has told it. */
  get writingMs() {
    return this.metrics?.generation_time_ms ?? this.rounds.lastMs - this.rounds.firstMs;
  }

  #now() {
    return performance.now() - this.#sentAt;
  }

  /** @param {State} state */
  #become(state) {
    this.state = state;
    this.element.dataset.state = state;
    const hasEnded = !["waiting", "writing"].includes(state);
    this.element.classList.toggle("is-empty", hasEnded && !this.entries.length && !this.content);
    this.element.setAttribute("aria-busy", String(state === "writing"));
    const isCut = state === "done" && this.#finishReason === "length";
    this.#stateLine.textContent = isCut ? "cut off at the most tokens it may have" : STATES[state];
  }

  // ---- tokens, or formatted text -----------------------------------------------------------------------------------

  /** @param {"tokens" | "formatted"} view of this answer, and of those that come */
  #choose(view) {
    write(() => localStorage, VIEW_AT, view);
    this.#show(view);
  }

  /** @param {"tokens" | "formatted"} view */
  #show(view) {
    const isFormatted = view === "formatted";
    this.#toggle.setAttribute("aria-pressed", String(isFormatted));
    this.text.hidden = isFormatted;
    this.#formatted?.remove();
    this.#formatted = isFormatted ? formatted(this.content) : null;
    if (this.#formatted) this.text.after(this.#formatted);
  }

  // ---- one token under the pointer, or under the keyboard ----------------------------------------------------------

  #listen() {
    this.text.addEventListener("pointerover", (event) => this.#point(event.target));
    this.text.addEventListener("pointerout", (event) => {
      if (event.pointerType === "touch") return; // a finger leaves at once; the next tap closes the popover
      this.strip.mark(-1);
      this.peek.hideSoon();
    });
    this.text.addEventListener("focusin", (event) => this.#point(event.target));
    this.text.addEventListener("focusout", () => {
      this.strip.mark(-1);
      this.peek.hide();
    });
    this.text.addEventListener("keydown", (event) => this.#walk(event));
  }

  /** @param {EventTarget | null} target */
  #point(target) {
    const idx = this.entries.findIndex((entry) => entry.element === target);
    if (idx < 0) return;
    const { aligned, element, roundIdx } = this.entries[idx];
    const round = this.rounds.list[roundIdx];
    const when = round ? `, ${duration(round.toMs)} after the question` : "";
    const which = roundIdx ? `pass ${roundIdx}` : "the prompt’s own pass";
    this.peek.show(element, { token: aligned.token, place: `Number ${idx + 1} of the answer, ${which}${when}.` });
    this.strip.mark(roundIdx);
  }

  /** @param {KeyboardEvent} event */
  #walk(event) {
    const idx = this.entries.findIndex((entry) => entry.element === document.activeElement);
    const last = this.entries.length - 1;
    /** @type {Record<string, number>} */
    const goals = { ArrowRight: Math.min(idx + 1, last), ArrowLeft: Math.max(idx - 1, 0), Home: 0, End: last };
    const goal = goals[event.key];
    if (idx < 0 || goal === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.entries[idx].element.tabIndex = -1;
    this.entries[goal].element.tabIndex = 0;
    this.entries[goal].element.focus();
  }
}

/** @param {Aligned} aligned */
function tokenElement({ token, text }) {
  const element = make("span", { class: `token ${originOf(token.origin).className}`, tabindex: "-1" }, text);
  if (text === "\n") element.classList.add("is-line-end");
  if (!text) element.dataset.mark = token.text.includes("\ufffd") ? "◦" : "■"; // part of a character; special token
  return element;
}

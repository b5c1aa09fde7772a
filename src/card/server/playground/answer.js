// @ts-check
// One answer as it is written: tinted tokens, timeline, figures.

import { Aligner } from "./align.js";
import { duration, make, percent, short } from "./dom.js";
import { originOf } from "./origins.js";
import { Rounds } from "./rounds.js";
import { Strip } from "./strip.js";

/** @typedef {import("./api.js").Piece} Piece */
/** @typedef {import("./api.js").Metrics} Metrics */
/** @typedef {import("./align.js").Aligned} Aligned */
/** @typedef {{aligned: Aligned, element: HTMLElement, roundIdx: number}} Entry */
/** @typedef {"waiting" | "writing" | "done" | "stopped" | "failed"} State */

const STATES = {
  waiting: "waits",
  writing: "writes",
  done: "done",
  stopped: "stopped",
  failed: "failed",
};

/** An answer, from the question's sending to its end. */
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
  #sentAt = NaN;
  /** @type {string | null} */
  #finishReason = null;
  #roundIdx = 0; // of the next token
  #numShown = 0;
  #figures = new Figures();
  #stateLine = make("span", { class: "state" });

  /**
   * @param {import("./strip.js").Scale} scale
   * @param {import("./peek.js").Peek} peek
   * @param {{lane: "card" | "plain", title: string}} lane
   */
  constructor(scale, peek, { lane, title }) {
    this.title = title;
    this.strip = new Strip(scale);
    this.peek = peek;
    this.text = make("div", { class: "text", role: "group", "aria-label": `${title}: the answer` });
    const head = make("header", {}, make("h3", {}, title), this.#stateLine);
    this.element = make("article", { class: "answer", "data-lane": lane }, head, this.text, this.strip.element);
    this.element.append(this.#figures.element);
    this.#listen();
    this.#become("waiting");
  }

  /** @param {string} note why it waits */
  wait(note) {
    this.#stateLine.textContent = note;
  }

  start() {
    this.#sentAt = performance.now();
    this.#become("writing");
  }

  /** @param {Piece[]} pieces that arrived together */
  take(pieces) {
    const atMs = this.#now();
    const tokens = pieces.flatMap((piece) => piece.tokens);
    const isLast = pieces.some((piece) => piece.finishReason !== null);
    this.rounds.push(tokens, atMs, isLast);
    for (const piece of pieces) {
      this.#finishReason = piece.finishReason ?? this.#finishReason;
      this.metrics = piece.metrics ?? this.metrics;
      this.#add(this.#aligner.push(piece.text, piece.tokens, piece.finishReason !== null));
    }
  }

  /** @param {Aligned[]} found */
  #add(found) {
    for (const aligned of found) {
      this.entries.push({ aligned, element: tokenElement(aligned), roundIdx: this.#roundIdx });
      if (originOf(aligned.token.origin).kind !== "accepted") this.#roundIdx += 1;
    }
  }

  /** @param {State} state */
  end(state) {
    this.endMs = this.#now();
    this.#add(this.#aligner.push("", [], true));
    this.paint();
    this.text.append(this.#aligner.rest);
    this.#become(state);
    this.#figures.finish(this);
    const count = `${this.rounds.numTokens} token${this.rounds.numTokens === 1 ? "" : "s"}`;
    const hint = this.entries.length ? "; the arrow keys go from token to token" : "";
    this.text.setAttribute("aria-label", `The answer, ${count}${hint}`);
  }

  /** Show what has come since the last time. */
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
    this.element.setAttribute("aria-busy", String(state === "writing"));
    const isCut = state === "done" && this.#finishReason === "length";
    this.#stateLine.textContent = isCut ? "cut off: it may have no more tokens" : STATES[state];
  }

  // ---- one token under the pointer, or under the keyboard ----------------------------------------------------------

  #listen() {
    this.text.addEventListener("pointerover", (event) => this.#point(event.target));
    this.text.addEventListener("pointerout", (event) => {
      if (event.pointerType === "touch") return; // a finger leaves at once; the popover goes with the next tap
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

/** The figures below an answer. */
class Figures {
  #recent = new Figure("tokens/s", "over the last second");
  #speed = new Figure("tokens/s", "since the first token");
  #perPass = new Figure("tokens/pass", "of the target, mean");
  #accepted = new Figure("accepted", "of the text, from the cache");
  #hits = new Figure("hit rate", "passes that found candidates");
  #candidates = new Figure("acceptance", "of the candidates: at the end");

  constructor() {
    const all = [this.#speed, this.#recent, this.#perPass, this.#accepted, this.#hits, this.#candidates];
    this.element = make("dl", { class: "figures" }, ...all.map((figure) => figure.element));
  }

  /** @param {Rounds} rounds @param {number} nowMs */
  update(rounds, nowMs) {
    this.#recent.show(short(rounds.recentTokensPerS(nowMs)));
    this.#speed.show(short(rounds.tokensPerS));
    this.#perPass.show(short(rounds.tokensPerPass));
    this.#accepted.show(percent(rounds.acceptedShare));
    this.#hits.show(percent(rounds.readyShare));
  }

  /** @param {Answer} answer */
  finish({ rounds, metrics, tokensPerS, writingMs }) {
    this.#speed.show(short(tokensPerS), `${rounds.numTokens} tokens in ${duration(writingMs)} after the first`);
    this.#recent.show(duration(rounds.firstMs), "until the first token", "");
    if (!metrics) return;
    const found = metrics.speculative_decoding;
    const hasCandidates = found.num_draft_tokens > 0;
    this.#perPass.show(short(found.mean_acceptance_length), `of the target, mean of ${found.num_spec_steps}`);
    this.#hits.show(hasCandidates ? percent(metrics.card.hit_rate) : "–", "next token was in the cache");
    const kept = `${found.num_accepted_draft_tokens} of ${found.num_draft_tokens} candidates`;
    const rate = hasCandidates ? percent(found.draft_acceptance_rate) : "–";
    this.#candidates.show(rate, hasCandidates ? kept : "no candidates");
  }
}

/** One figure: a number, its unit, what it is. */
class Figure {
  #value = make("span", { class: "value" }, "–");
  #unit;
  #note;

  /** @param {string} unit @param {string} note */
  constructor(unit, note) {
    this.#unit = make("span", { class: "unit" }, unit);
    this.#note = make("dt", {}, note);
    this.element = make("div", {}, this.#note, make("dd", {}, this.#value, " ", this.#unit));
  }

  /** @param {string} value @param {string} [note] @param {string} [unit] */
  show(value, note, unit) {
    this.#value.textContent = value;
    if (note !== undefined) this.#note.textContent = note;
    if (unit !== undefined) this.#unit.textContent = unit;
  }
}

// @ts-check
// The figures below an answer: measured in the browser during the answer, then the server's own figures.

import { duration, make, percent, short } from "./dom.js";

/** @typedef {import("./rounds.js").Rounds} Rounds */
/** @typedef {import("./answer.js").Answer} Answer */

/** The figures below an answer. */
export class Figures {
  #recent = new Figure("tokens/s", "over the last second");
  #speed = new Figure("tokens/s", "since the first token");
  #perPass = new Figure("tokens/pass", "of the target, mean");
  #accepted = new Figure("of text", "was drafted and accepted");
  #drafted = new Figure("of passes", "had candidates to check");
  #candidates = new Figure("of candidates", "accepted: told at the end");

  constructor() {
    const all = [this.#speed, this.#recent, this.#perPass, this.#accepted, this.#drafted, this.#candidates];
    this.element = make("dl", { class: "figures" }, ...all.map((figure) => figure.element));
  }

  /** @param {Rounds} rounds @param {number} nowMs */
  update(rounds, nowMs) {
    this.#recent.show(short(rounds.recentTokensPerS(nowMs)));
    this.#speed.show(short(rounds.tokensPerS));
    this.#perPass.show(short(rounds.tokensPerPass));
    this.#accepted.show(percent(rounds.acceptedShare));
    this.#drafted.show(percent(rounds.draftedShare));
  }

  /** @param {Answer} answer */
  finish({ rounds, metrics, tokensPerS, writingMs }) {
    const count = `${rounds.numTokens} token${rounds.numTokens === 1 ? "" : "s"}`;
    this.#speed.show(short(tokensPerS), `${count} in ${duration(writingMs)} after the first`);
    this.#recent.show(duration(rounds.firstMs), "until the first token", "");
    if (!metrics) return;
    const found = metrics.speculative_decoding;
    const hasCandidates = found.num_draft_tokens > 0;
    this.#perPass.show(short(found.mean_acceptance_length), `of the target, mean of ${found.num_spec_steps}`);
    const kept = `accepted: ${found.num_accepted_draft_tokens} of ${found.num_draft_tokens}`;
    const rate = hasCandidates ? percent(found.draft_acceptance_rate) : "–";
    this.#candidates.show(rate, hasCandidates ? kept : "there were none");
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

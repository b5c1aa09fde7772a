// @ts-check
// The passes of the target behind a stream, and the figures that follow from them.

import { originOf } from "./origins.js";

/** @typedef {import("./api.js").Token} Token */
/** @typedef {{fromMs: number, toMs: number, classNames: string[], hadCandidates: boolean}} Round */

/** Counts tokens and passes as they arrive; times are those of this browser, from the sending of the question. */
export class Rounds {
  /** @type {Round[]} */
  list = [];
  numTokens = 0;
  numAccepted = 0;
  firstMs = NaN;
  lastMs = NaN;
  /** @type {string[]} */
  #open = [];
  /** @type {{atMs: number, count: number}[]} */
  #arrivals = [];

  /**
   * Add what has arrived together.
   * A pass ends with the one token that is the target's own. Passes that arrived together share the time since before.
   * @param {Token[]} tokens
   * @param {number} atMs
   * @param {boolean} isLast
   */
  push(tokens, atMs, isLast) {
    /** @type {{classNames: string[], hadCandidates: boolean}[]} */
    const closed = [];
    for (const token of tokens) {
      const { kind, className } = originOf(token.origin);
      this.#open.push(className);
      if (kind === "accepted") this.numAccepted += 1;
      else closed.push({ classNames: this.#open.splice(0), hadCandidates: kind === "corrected" });
    }
    if (isLast && this.#open.length) closed.push({ classNames: this.#open.splice(0), hadCandidates: true });
    if (!tokens.length) return;
    const fromMs = Number.isNaN(this.lastMs) ? 0 : this.lastMs;
    const stepMs = (atMs - fromMs) / Math.max(1, closed.length);
    closed.forEach((round, idx) => {
      this.list.push({ ...round, fromMs: fromMs + idx * stepMs, toMs: fromMs + (idx + 1) * stepMs });
    });
    if (!this.numTokens) this.firstMs = atMs;
    this.numTokens += tokens.length;
    this.lastMs = atMs;
    this.#arrivals.push({ atMs, count: tokens.length });
  }

  /** Passes after the prompt's own, which gives the first token. */
  get numPasses() {
    return Math.max(0, this.list.length - 1);
  }

  /** Tokens that one pass brought, mean. */
  get tokensPerPass() {
    return this.numPasses ? (this.numTokens - 1) / this.numPasses : NaN;
  }

  /** Share of the passes that had candidates. */
  get draftedShare() {
    return this.numPasses ? this.list.slice(1).filter((round) => round.hadCandidates).length / this.numPasses : NaN;
  }

  /** Share of the text that had been drafted and was accepted. */
  get acceptedShare() {
    return this.numTokens ? this.numAccepted / this.numTokens : NaN;
  }

  /** Tokens per second after the first one. */
  get tokensPerS() {
    return this.numTokens > 1 ? (1000 * (this.numTokens - 1)) / (this.lastMs - this.firstMs) : NaN;
  }

  /**
   * Tokens per second over the last second.
   * @param {number} nowMs
   */
  recentTokensPerS(nowMs) {
    const spanMs = Math.min(1000, nowMs - this.firstMs);
    while (this.#arrivals.length && this.#arrivals[0].atMs < nowMs - 1000) this.#arrivals.shift();
    const count = this.#arrivals.reduce((sum, arrival) => sum + arrival.count, 0);
    return spanMs > 100 ? (1000 * count) / spanMs : NaN;
  }

  /** What the timeline shows, in a sentence. */
  describe() {
    if (!this.list.length) return "Timeline: nothing yet.";
    const sizes = this.list.map((round) => round.classNames.length);
    return (
      `Timeline: ${this.numTokens} tokens in ${this.list.length} passes over ${Math.round(this.lastMs)} ms, ` +
      `${Math.min(...sizes)} to ${Math.max(...sizes)} tokens each; ${this.numAccepted} were drafted and accepted.`
    );
  }
}

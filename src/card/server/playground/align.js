// @ts-check
// Which token holds which part of the text: the two arrive side by side, and some tokens have no text of their own.

/** @typedef {import("./api.js").Token} Token */
/** @typedef {{token: Token, text: string}} Aligned the texts together are the answer's text, whatever tokens say */

/** Hands the text out to the tokens. */
export class Aligner {
  #text = "";
  /** @type {Token[]} */
  #tokens = [];
  #hasBegun = false;

  /**
   * Add new text and tokens.
   * @param {string} text
   * @param {Token[]} tokens
   * @param {boolean} isLast nothing more comes
   * @returns {Aligned[]} the pairs that are certain now
   */
  push(text, tokens, isLast) {
    this.#text += text;
    this.#tokens.push(...tokens);
    const found = this.#settle();
    if (isLast) {
      const unsure = this.#tokens.splice(0);
      found.push(...unsure.map((token, idx) => this.#take(token, idx ? 0 : this.#text.length)));
    }
    return found;
  }

  /** Text that belongs to no token yet; after the last piece it never will. */
  get rest() {
    return this.#text;
  }

  #settle() {
    /** @type {Aligned[]} */
    const found = [];
    while (this.#tokens.length && this.#text) {
      const length = this.#lengthOf(this.#tokens[0]);
      if (length) {
        found.push(this.#take(/** @type {Token} */ (this.#tokens.shift()), length));
        continue;
      }
      const { numTokens, end } = this.#nextCertain();
      if (!numTokens) break;
      const unsure = this.#tokens.splice(0, numTokens);
      found.push(...unsure.map((token, idx) => this.#take(token, idx === numTokens - 1 ? end : 0)));
    }
    return found;
  }

  /** @param {Token} token @param {number} length */
  #take(token, length) {
    const text = this.#text.slice(0, length);
    this.#text = this.#text.slice(length);
    this.#hasBegun = true;
    return { token, text };
  }

  /** @param {Token} token @returns {number} characters with which the waiting text is this token's; 0 if it is not */
  #lengthOf(token) {
    if (this.#text.startsWith(token.text)) return token.text.length;
    const trimmed = token.text.trimStart(); // a text's first blank may be dropped
    return !this.#hasBegun && trimmed && this.#text.startsWith(trimmed) ? trimmed.length : 0;
  }

  /** Parts of one character, and special tokens: they end where the next token's own text begins. */
  #nextCertain() {
    for (let idx = 1; idx < this.#tokens.length; idx++) {
      const { text } = this.#tokens[idx];
      const end = text && !text.includes("\ufffd") ? this.#text.indexOf(text) : -1;
      if (end >= 0) return { numTokens: idx, end };
    }
    return { numTokens: 0, end: 0 };
  }
}

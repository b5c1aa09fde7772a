// @ts-check
// Which parts of a growing text are code: a block whose fence is still open counts as code.

// Markers of lists and quotations may come before a fence.
const FENCE = /^\s*(?:(?:[-*+>]|\d+[.)])\s+)*(`{3,}|~{3,})/;

/** Follows a text through its blocks and spans of code, as Markdown has them. */
export class CodeFinder {
  #line = ""; // the present line so far
  #fence = ""; // fence of the open block; empty outside of blocks

  /**
   * @param {string} text that comes next
   * @returns {boolean} whether its last character that can be seen, or all of it if there is none, is code
   */
  push(text) {
    let isCode = this.#isCode();
    for (const part of text.split(/(?<=\n)/)) {
      const wasCode = this.#isCode();
      this.#line += part;
      if (part.trim()) isCode = wasCode || this.#isCode();
      if (part.endsWith("\n")) this.#endLine();
    }
    return isCode;
  }

  #isCode() {
    if (this.#fence || FENCE.test(this.#line)) return true;
    return (this.#line.match(/`/g) ?? []).length % 2 > 0;
  }

  #endLine() {
    const line = this.#line.trimEnd();
    const found = FENCE.exec(line);
    this.#line = "";
    if (!found) return;
    const [marked, fence] = found;
    const rest = line.slice(marked.length);
    const isClosed = this.#fence && fence[0] === this.#fence[0] && fence.length >= this.#fence.length && !rest;
    if (isClosed) this.#fence = "";
    else if (!this.#fence && !(fence[0] === "`" && rest.includes("`"))) this.#fence = fence;
  }
}

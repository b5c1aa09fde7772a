// @ts-check
// Which of a text is code, told while it comes: a block whose fence is still open is code already.

// Of lists and quotations, in which a fence may stand, there may be markers before it.
const FENCE = /^\s*(?:(?:[-*+>]|\d+[.)])\s+)*(`{3,}|~{3,})/;

/** Follows a text through its blocks and spans of code, as Markdown has them. */
export class CodeFinder {
  #line = ""; // as far as it has come
  #fence = ""; // that opened the block that the text is in; empty outside of blocks

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

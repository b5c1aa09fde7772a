// @ts-check
// Popover of one token: its origin, and the candidates verified in its place.

import { make, percent } from "./dom.js";
import { originOf } from "./origins.js";

/** @typedef {import("./api.js").Token} Token */
/** @typedef {{token: Token, place: string}} Facts */

const MOST_SHOWN = 8;
const GAP_PX = 8;
const LEAVING_MS = 160; // for the pointer to get from the token onto the popover

/** The one popover of the page. */
export class Peek {
  /** @type {HTMLElement | null} */
  #owner = null;
  #leaving = 0;

  /** @param {HTMLElement} element of the page */
  constructor(element) {
    this.element = element;
    element.addEventListener("pointerenter", () => clearTimeout(this.#leaving));
    element.addEventListener("pointerleave", () => this.hideSoon());
    addEventListener("scroll", () => this.#follow(), { capture: true, passive: true });
    addEventListener("resize", () => this.#follow());
    addEventListener("pointerdown", (event) => {
      const { target } = event;
      if (target !== this.#owner && !(target instanceof Node && element.contains(target))) this.hide();
    });
  }

  /**
   * @param {HTMLElement} owner the token's element
   * @param {Facts} facts
   */
  show(owner, facts) {
    clearTimeout(this.#leaving);
    if (owner === this.#owner) return;
    this.hide();
    this.#owner = owner;
    owner.setAttribute("aria-describedby", this.element.id);
    owner.classList.add("is-shown");
    this.element.replaceChildren(...contents(facts));
    this.element.hidden = false;
    this.#place();
  }

  hide() {
    clearTimeout(this.#leaving);
    this.#owner?.removeAttribute("aria-describedby");
    this.#owner?.classList.remove("is-shown");
    this.#owner = null;
    this.element.hidden = true;
  }

  hideSoon() {
    clearTimeout(this.#leaving);
    this.#leaving = setTimeout(() => {
      if (this.#owner !== document.activeElement) this.hide();
    }, LEAVING_MS);
  }

  #follow() {
    const at = this.#owner?.getBoundingClientRect();
    if (at && (at.bottom < 0 || at.top > innerHeight)) this.hide();
    else this.#place();
  }

  #place() {
    if (!this.#owner) return;
    const at = this.#owner.getClientRects()[0] ?? this.#owner.getBoundingClientRect();
    const own = this.element.getBoundingClientRect();
    const room = document.documentElement.clientWidth - own.width - GAP_PX;
    const above = at.top - own.height - GAP_PX;
    this.element.style.left = `${Math.max(GAP_PX, Math.min(at.left, room))}px`;
    this.element.style.top = `${above >= GAP_PX ? above : at.bottom + GAP_PX}px`;
  }
}

/** @param {Facts} facts */
function contents({ token, place }) {
  const origin = originOf(token.origin);
  const head = make(
    "p",
    { class: "peek-head" },
    make("span", { class: `token ${origin.className}` }, visible(token.text)),
    make("span", { class: "quiet" }, `token ${token.token_id}`),
  );
  return [head, make("p", {}, origin.explanation), ...alternatives(token), make("p", { class: "quiet" }, place)];
}

/** @param {Token} token */
function alternatives(token) {
  const { length } = token.alternatives;
  if (!length) return [];
  const rows = token.alternatives.slice(0, MOST_SHOWN).map(({ text, path_logprob, writer, token_id }) => {
    const probability = Math.exp(path_logprob);
    const fill = make("span", { class: "fill" });
    fill.style.width = `${Math.min(100, 100 * probability)}%`;
    return make(
      "tr",
      {},
      make("td", {}, make("code", { title: `token ${token_id}` }, visible(text))),
      make("td", { class: "share" }, make("span", { class: "bar", "aria-hidden": "true" }, fill)),
      make("td", { class: "number" }, percentOf(probability)),
      make("td", { class: "quiet" }, writer),
    );
  });
  const caption = make("caption", {}, "Beside it in the tree, and refused");
  const note =
    "Probability: the proposer’s own, of the whole path since the pass began." +
    (length > MOST_SHOWN ? ` ${length - MOST_SHOWN} more are not shown.` : "");
  return [make("table", {}, caption, make("tbody", {}, ...rows)), make("p", { class: "quiet" }, note)];
}

/** @param {number} probability */
function percentOf(probability) {
  return probability > 0 && probability < 0.005 ? "< 1 %" : percent(probability);
}

/** @param {string} text @returns {string} with its blanks to be seen */
function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(no text)";
}

// @ts-check
// How a token came, as a class to tint it by, and in words.

import { make } from "./dom.js";

const DRAFTER = "beam"; // writer name of the draft model
const MOST_LOCAL = 3; // colours for writers without a model; further ones share the last

/**
 * @typedef {object} Origin
 * @property {"accepted" | "corrected" | "plain"} kind
 * @property {string} className of tokens, bars and the legend's patches
 * @property {string} name in the legend
 * @property {string} explanation a sentence
 */

/** @type {Origin} */
const PLAIN = {
  kind: "plain",
  className: "plain",
  name: "plain",
  explanation: "Plain: there were no candidates in this pass, so the target wrote the token alone.",
};
/** @type {Origin} */
const CORRECTED = {
  kind: "corrected",
  className: "corrected",
  name: "corrected",
  explanation: "The target’s own: the candidates in this place were wrong, or there were no more.",
};

/** @type {Map<string, Origin>} */
const known = new Map([
  ["plain", PLAIN],
  ["", CORRECTED],
]);
let numLocal = 0;
/** @type {HTMLElement | null} */
let legend = null;

/**
 * Return what is to be said of an origin as the server names it: the writers, joined by "+", "" or "plain".
 * @param {string} origin
 * @returns {Origin}
 */
export function originOf(origin) {
  let found = known.get(origin);
  if (!found) {
    found = accepted(origin);
    known.set(origin, found);
    addToLegend(found);
  }
  return found;
}

/** @param {string} origin @returns {Origin} */
function accepted(origin) {
  const writers = origin.split("+");
  const names = writers.map((writer) => (writer === DRAFTER ? "the draft model" : `the writer ${writer}`));
  const explanation = `Accepted: ${listed(names)} had proposed it, and the target agreed.`;
  if (writers.length > 1) {
    return { kind: "accepted", className: "accepted by-several", name: "accepted (several agreed)", explanation };
  }
  if (origin === DRAFTER) {
    return { kind: "accepted", className: "accepted by-beam", name: "accepted (draft model)", explanation };
  }
  numLocal = Math.min(numLocal + 1, MOST_LOCAL);
  return { kind: "accepted", className: `accepted by-local-${numLocal}`, name: `accepted (${origin})`, explanation };
}

/** @param {string[]} names */
function listed(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

/**
 * Fill the legend; origins that turn up later are added to it.
 * @param {HTMLElement} list
 */
export function showLegend(list) {
  legend = list;
  originOf(DRAFTER);
  for (const origin of [CORRECTED, PLAIN]) addToLegend(origin);
}

/** @param {Origin} origin */
function addToLegend({ kind, className, name }) {
  const isThere = legend && [...legend.children].some((item) => item.textContent?.endsWith(name));
  if (!legend || isThere) return;
  const patch = make("span", { class: `token ${className}`, "aria-hidden": "true" }, "Ab");
  const item = make("li", {}, patch, ` ${name}`);
  const firstOther = kind === "accepted" ? legend.querySelector(":scope > .is-other") : null;
  if (kind !== "accepted") item.className = "is-other";
  legend.insertBefore(item, firstOther);
}

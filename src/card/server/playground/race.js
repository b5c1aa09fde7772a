// @ts-check
// CARD against plain decoding: the same question and seed, one after the other, and what came of it.

import { duration, make, short } from "./dom.js";

/** @typedef {import("./answer.js").Answer} Answer */

/**
 * Say who was how fast, and whether both wrote the same; mark where the texts part.
 * @param {Answer} card
 * @param {Answer} plain
 */
export function verdict(card, plain) {
  if (card.state !== "done" || plain.state !== "done") {
    return make("p", { class: "verdict" }, "The race was not run to its end.");
  }
  const ratio = card.tokensPerS / plain.tokensPerS;
  const fast = Number.isFinite(ratio) ? `${short(ratio)} times as fast.` : "Too short to compare.";
  const [ours, theirs] = [card, plain].map((answer) => `${answer.title}: ${duration(answer.writingMs)}`);
  const times = ` ${ours}. ${theirs}. Both after the first token. `;
  return make("p", { class: "verdict" }, make("strong", {}, fast), times, sameness(card, plain), rest(card));
}

/** @param {Answer} card @returns {string} why the server decoded plainly in both runs, if it chose to */
function rest({ metrics }) {
  const schedule = metrics?.card.speculation ?? "";
  return schedule.startsWith("off") ? ` This server lets its drafter rest at present (${schedule}).` : "";
}

/**
 * @param {Answer} card
 * @param {Answer} plain
 */
function sameness(card, plain) {
  const [ours, theirs] = [card.tokenIds, plain.tokenIds];
  const most = Math.max(ours.length, theirs.length);
  const partIdx = Array.from({ length: most }, (_, idx) => idx).find((idx) => ours[idx] !== theirs[idx]);
  if (partIdx === undefined) return `Same text: yes, all ${most} tokens.`;
  for (const answer of [card, plain]) answer.entries[partIdx]?.element.classList.add("parts");
  return (
    `Same text: no, they part at token ${partIdx + 1}, outlined in both. In float32 they never do; in bfloat16 two ` +
    "tokens may all but tie, and a pass over several tokens rounds otherwise than a pass over one."
  );
}

// @ts-check
// CARD against plain decoding: the same question and seed, one after the other, and a comparison.

import { duration, make, short } from "./dom.js";

/** @typedef {import("./answer.js").Answer} Answer */

/**
 * Report both speeds, and whether the texts are equal; mark where they differ.
 * @param {Answer} card
 * @param {Answer} plain
 */
export function verdict(card, plain) {
  if (card.state !== "done" || plain.state !== "done") {
    return make("p", { class: "verdict" }, "The race was stopped before both had finished, so there is no comparison.");
  }
  const times = [card, plain].map((answer) => `${inSentence(answer)} ${duration(answer.writingMs)}`).join(", ");
  const measured = ` Time after the first token: ${times}. `;
  return make("p", { class: "verdict" }, make("strong", {}, winner(card, plain)), measured, sameness(card, plain), rest(card));
}

/**
 * @param {Answer} card
 * @param {Answer} plain
 */
function winner(card, plain) {
  const ratio = card.tokensPerS / plain.tokensPerS;
  if (!Number.isFinite(ratio) || ratio <= 0) return "The answers are too short to compare.";
  const [first, second] = ratio < 1 ? [plain, card] : [card, plain];
  const factor = short(Math.max(ratio, 1 / ratio));
  if (factor === short(1)) return `${card.title} and ${inSentence(plain)} were equally fast.`;
  return `${first.title} was ${factor} times as fast as ${inSentence(second)}.`;
}

/** @param {Answer} answer */
function inSentence({ lane, title }) {
  return lane === "plain" ? title.toLowerCase() : title;
}

/** @param {Answer} card @returns {string} why the server drafts no more, if it chose so */
function rest({ metrics }) {
  const schedule = metrics?.card.speculation ?? "";
  const isResting = schedule.startsWith("off");
  return isResting ? ` Going by its own measurements, the server now decodes without drafting (${schedule}).` : "";
}

/**
 * @param {Answer} card
 * @param {Answer} plain
 */
function sameness(card, plain) {
  const [ours, theirs] = [card.tokenIds, plain.tokenIds];
  const most = Math.max(ours.length, theirs.length);
  const partIdx = Array.from({ length: most }, (_, idx) => idx).find((idx) => ours[idx] !== theirs[idx]);
  if (partIdx === undefined) return `Both texts are the same, all ${most} tokens.`;
  for (const answer of [card, plain]) answer.entries[partIdx]?.element.classList.add("parts");
  return (
    `The texts differ from token ${partIdx + 1} on, which is outlined in both. In bfloat16 this can happen where two ` +
    "tokens score nearly the same, as a pass over several tokens rounds differently from a pass over one. In float32 " +
    "it does not happen."
  );
}

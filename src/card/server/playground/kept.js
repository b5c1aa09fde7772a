// @ts-check
// The conversation, kept over a reload: by the tab, and for the next tab by the browser.

import { read, write } from "./storage.js";

/** @typedef {import("./turn.js").KeptTurn} KeptTurn */
/** @typedef {{version: number, system: string, turns: KeptTurn[]}} Kept */

const AT = "card.conversation";
const VERSION = 1; // of what is kept: another version's is not read
const MOST_CHARS = 1_000_000; // browsers give a page 2.5 million or more, twice: here for the tab and for the browser
/** @type {import("./storage.js").Area[]} */
const AREAS = [() => sessionStorage, () => localStorage]; // the tab's own first, so that two tabs do not mix their conversations

/** @returns {Kept | null} what was kept last, or null if there is nothing that can be read */
export function load() {
  for (const area of AREAS) {
    try {
      const kept = JSON.parse(read(area, AT));
      if (kept.version === VERSION) return kept;
    } catch {
      // Nothing, or not ours.
    }
  }
  return null;
}

/**
 * Keep a conversation in place of the last one: the newest turns that there is room for.
 * @param {string} system prompt
 * @param {KeptTurn[]} turns none to keep nothing
 */
export function save(system, turns) {
  const fitting = newest(turns);
  const content = fitting.length ? JSON.stringify({ version: VERSION, system, turns: fitting }) : "";
  for (const area of AREAS) write(area, AT, content);
}

/** @param {KeptTurn[]} turns */
function newest(turns) {
  /** @type {KeptTurn[]} */
  const fitting = [];
  let room = MOST_CHARS;
  for (const turn of turns.toReversed()) {
    const found = [turn, withoutAlternatives(turn)].find((one) => JSON.stringify(one).length <= room);
    if (!found) break;
    room -= JSON.stringify(found).length;
    fitting.unshift(found);
  }
  return fitting;
}

/** @param {KeptTurn} turn @returns {KeptTurn} the same, without what was beside its tokens: most of its length */
function withoutAlternatives(turn) {
  return JSON.parse(JSON.stringify(turn, (name, value) => (name === "alternatives" ? [] : value)));
}

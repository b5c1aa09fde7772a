// @ts-check
// The timeline of an answer: a bar for each pass of the target, as wide as the time it took, as high as its tokens.

import { make } from "./dom.js";

/** @typedef {import("./rounds.js").Rounds} Rounds */

const SVG = "http://www.w3.org/2000/svg";
const LEAST_HEIGHT = 4; // tokens
const NUM_TICKS = 4;

/** Several strips of a race share one scale, so that lengths can be compared. */
export class Scale {
  spanMs = 400;
  height = LEAST_HEIGHT;

  /** @param {Rounds} rounds @param {number} nowMs */
  include(rounds, nowMs) {
    while (this.spanMs < nowMs) this.spanMs = nextNice(this.spanMs);
    for (const round of rounds.list) this.height = Math.max(this.height, round.classNames.length);
  }
}

/** One strip; its picture is stretched to the scale, so that only new bars are ever drawn. */
export class Strip {
  #picture = document.createElementNS(SVG, "svg");
  #ticks = make("div", { class: "ticks", "aria-hidden": "true" });
  #highest = make("span", { class: "highest", "aria-hidden": "true" });
  #drawn = "";
  #numBars = 0;

  /** @param {Scale} scale */
  constructor(scale) {
    this.scale = scale;
    this.#picture.setAttribute("role", "img");
    this.#picture.setAttribute("aria-label", "Timeline: nothing yet.");
    this.#picture.setAttribute("preserveAspectRatio", "none");
    this.element = make("figure", { class: "strip" }, this.#highest, this.#picture, this.#ticks);
  }

  /** @param {Rounds} rounds @param {number} nowMs */
  draw(rounds, nowMs) {
    this.scale.include(rounds, nowMs);
    for (; this.#numBars < rounds.list.length; this.#numBars++) this.#add(rounds.list[this.#numBars]);
    const { spanMs, height } = this.scale;
    const drawn = `0 ${-height} ${spanMs} ${height}`;
    if (drawn !== this.#drawn) {
      this.#drawn = drawn;
      this.#picture.setAttribute("viewBox", drawn);
      this.#highest.textContent = `${height} tokens a pass`;
      const ticks = Array.from({ length: NUM_TICKS + 1 }, (_, idx) => (spanMs * idx) / NUM_TICKS);
      this.#ticks.replaceChildren(...ticks.map((ms, idx) => make("span", {}, idx ? `${ms}` : "0 ms")));
    }
    this.#picture.setAttribute("aria-label", rounds.describe());
  }

  /**
   * Point out one bar, or none.
   * @param {number} roundIdx
   */
  mark(roundIdx) {
    this.#picture.querySelector(".is-marked")?.classList.remove("is-marked");
    this.#picture.children[roundIdx]?.classList.add("is-marked");
  }

  /** @param {import("./rounds.js").Round} round */
  #add({ fromMs, toMs, classNames }) {
    const bar = document.createElementNS(SVG, "g");
    for (let from = 0; from < classNames.length; ) {
      let to = from + 1;
      while (to < classNames.length && classNames[to] === classNames[from]) to++;
      const part = document.createElementNS(SVG, "rect");
      const place = { x: fromMs, y: -to, width: Math.max(0.1, toMs - fromMs), height: to - from };
      for (const [name, value] of Object.entries(place)) part.setAttribute(name, String(value));
      part.setAttribute("class", classNames[from]);
      bar.append(part);
      from = to;
    }
    this.#picture.append(bar);
  }
}

/** @param {number} ms @returns {number} the next length whose quarters are round */
function nextNice(ms) {
  const power = 10 ** Math.floor(Math.log10(ms));
  const lead = [1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].find((lead) => lead * power > ms) ?? 10;
  return Math.round(lead * power);
}

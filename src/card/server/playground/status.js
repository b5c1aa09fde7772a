// @ts-check
// Name and health of the server: requested rarely, and only while the page is visible.

import { byId } from "./dom.js";

const EVERY_MS = 15_000;

/** @typedef {{served_model_name: string, model: string, draft_model: string | null, method: string,
 *   target_cost: string | null}} Served */

/** The line that says how the server does. */
export class Status {
  #line = byId("state", HTMLElement);
  #hadDrafter = false;

  constructor() {
    setInterval(() => this.refresh(), EVERY_MS);
    document.addEventListener("visibilitychange", () => this.refresh());
  }

  /** Ask once what serves. @returns {Promise<Served | null>} null if nothing answers */
  async served() {
    try {
      /** @type {Served} */
      const served = await (await fetch("version")).json();
      this.#hadDrafter = served.draft_model !== null;
      byId("served", HTMLElement).textContent = describe(served);
      return served;
    } catch {
      return null;
    }
  }

  async refresh() {
    if (document.hidden) return;
    const { level, text } = await this.#look();
    this.#line.dataset.level = level;
    if (this.#line.textContent !== text) this.#line.textContent = text;
  }

  async #look() {
    try {
      const ready = await fetch("health/ready");
      if (!ready.ok) return { level: "bad", text: (await ready.json()).error?.message ?? "the server is not ready" };
      const figures = await (await fetch("metrics")).text();
      const isUp = /^card_drafter_up\b.* 1(\.0)?$/m.test(figures);
      this.#hadDrafter ||= isUp;
      if (isUp) return { level: "good", text: "drafter up" };
      if (!this.#hadDrafter) return { level: "good", text: "ready, no drafter" };
      return { level: "poor", text: "drafter down: same text, plain speed" };
    } catch {
      return { level: "bad", text: "the server cannot be reached" };
    }
  }
}

/** @param {Served} served */
function describe({ served_model_name, model, draft_model, method, target_cost }) {
  const pair = draft_model ? `${model} with ${draft_model}` : model;
  const named = served_model_name === model ? pair : `${served_model_name} · ${pair}`;
  return [named, `method ${method}`, ...(target_cost ? [`target at ${target_cost}`] : [])].join(" · ");
}

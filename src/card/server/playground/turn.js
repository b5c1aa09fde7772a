// @ts-check
// A turn of the conversation: the question, its answers, and a comparison.

import { Answer } from "./answer.js";
import { make } from "./dom.js";
import { verdict } from "./race.js";
import { Scale } from "./strip.js";

/** @typedef {import("./answer.js").Heading} Heading */
/** @typedef {{question: string, answers: import("./answer.js").KeptAnswer[]}} KeptTurn */

/** A question with one answer, or with the two of a race: CARD's first. */
export class Turn {
  /** @type {Answer[]} */
  answers = [];
  #panes = make("div", { class: "panes" });
  #outcome = make("div", { class: "outcome" });
  #scale = new Scale();

  /**
   * @param {string} question
   * @param {import("./peek.js").Peek} peek
   */
  constructor(question, peek) {
    this.question = question;
    this.peek = peek;
    const heading = make("h2", { class: "question" }, question);
    this.element = make("section", { class: "turn" }, heading, this.#panes, this.#outcome);
  }

  /** @param {KeptTurn} kept @param {import("./peek.js").Peek} peek */
  static from({ question, answers }, peek) {
    const turn = new Turn(question, peek);
    for (const kept of answers) turn.add(kept).replay(kept);
    for (const answer of turn.answers) answer.paint(); // on the scale of both
    turn.judge();
    return turn;
  }

  /** @param {Heading} heading */
  add(heading) {
    const answer = new Answer(this.#scale, this.peek, heading);
    this.answers.push(answer);
    this.#panes.append(answer.element);
    return answer;
  }

  /** Say what came of a race. @returns {string} what is said, empty if this was none */
  judge() {
    if (this.answers.length < 2) return "";
    const [card, plain] = this.answers;
    card.paint();
    const told = verdict(card, plain);
    this.tell(told);
    return told.textContent ?? "";
  }

  /** @param {HTMLElement} element to stand below the answers */
  tell(element) {
    this.#outcome.append(element);
  }

  /** The answer that later questions build on; empty if there is none. */
  get content() {
    const [first] = this.answers;
    return first && ["done", "stopped"].includes(first.state) ? first.content : "";
  }

  /** @returns {KeptTurn} what `from` needs */
  keep() {
    return { question: this.question, answers: this.answers.map((answer) => answer.keep()) };
  }
}

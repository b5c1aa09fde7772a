// @ts-check
// What the user chose: how to sample, what to send, the key, the theme.

import { byId } from "./dom.js";
import { read, write } from "./storage.js";

const KEY_AT = "card.key"; // in the tab's own storage, gone with the tab
const THEME_AT = "card.theme";

/** The settings beside the conversation. */
export class Settings {
  #panel = byId("settings", HTMLElement);
  #toggle = byId("toggle-settings", HTMLButtonElement);
  #form = byId("settings-form", HTMLFormElement);
  #temperature = byId("temperature", HTMLInputElement);
  #topP = byId("top-p", HTMLInputElement);
  #seed = byId("seed", HTMLInputElement);
  #maxTokens = byId("max-tokens", HTMLInputElement);
  #system = byId("system", HTMLTextAreaElement);
  #sendsEarlier = byId("sends-earlier", HTMLInputElement);
  #key = byId("key", HTMLInputElement);

  constructor() {
    this.#toggle.addEventListener("click", () => this.open(!this.isOpen));
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#key.value = read(() => sessionStorage, KEY_AT);
    this.#key.addEventListener("change", () => write(() => sessionStorage, KEY_AT, this.#key.value.trim()));
    this.#chooseTheme();
  }

  get isOpen() {
    return this.#panel.classList.contains("is-open");
  }

  /** @param {boolean} isOpen matters on narrow screens only; there is room beside the conversation on others */
  open(isOpen) {
    this.#panel.classList.toggle("is-open", isOpen);
    this.#toggle.setAttribute("aria-expanded", String(isOpen));
    this.#toggle.textContent = isOpen ? "Back" : "Settings";
    scrollTo({ top: isOpen ? 0 : document.documentElement.scrollHeight });
  }

  /** @returns {string} empty, or the name of a field whose value cannot be sent */
  get fault() {
    const wrong = [this.#temperature, this.#topP, this.#seed, this.#maxTokens].find((field) => !field.validity.valid);
    return wrong ? `${wrong.labels?.[0]?.textContent?.trim()}: ${wrong.validationMessage}` : "";
  }

  get key() {
    return this.#key.value.trim();
  }

  get sendsEarlier() {
    return this.#sendsEarlier.checked;
  }

  set sendsEarlier(sends) {
    this.#sendsEarlier.checked = sends;
  }

  get system() {
    return this.#system.value.trim();
  }

  set system(prompt) {
    this.#system.value = prompt;
  }

  /** Parameters of a request; a seed that is left out is drawn, so that it can be told, and used twice. */
  get sampling() {
    return {
      temperature: numberOf(this.#temperature),
      top_p: numberOf(this.#topP),
      max_tokens: numberOf(this.#maxTokens),
      seed: numberOf(this.#seed) ?? Math.floor(Math.random() * 2 ** 31),
    };
  }

  /** Bring the user to where the key goes. */
  askForKey() {
    this.open(true);
    this.#key.focus();
    this.#key.select();
  }

  #chooseTheme() {
    const chosen = read(() => localStorage, THEME_AT) || "system";
    for (const choice of document.querySelectorAll('input[name="theme"]')) {
      if (!(choice instanceof HTMLInputElement)) continue;
      choice.checked = choice.value === chosen;
      choice.addEventListener("change", () => {
        write(() => localStorage, THEME_AT, choice.value);
        if (choice.value === "system") delete document.documentElement.dataset.theme;
        else document.documentElement.dataset.theme = choice.value;
      });
    }
  }
}

/** @param {HTMLInputElement} field @returns {number | undefined} */
function numberOf(field) {
  return Number.isNaN(field.valueAsNumber) ? undefined : field.valueAsNumber;
}

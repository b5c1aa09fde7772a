// @ts-check
// Buttons that copy a text as it is.

import { byId, make } from "./dom.js";

const TOLD_MS = 2000;

/**
 * Return a button that copies a text.
 * @param {string} what in words, such as "the code"
 * @param {() => string} textOf the text at the time of the press
 */
export function copyButton(what, textOf) {
  const told = make("span", {}, "Copy");
  const button = make("button", { type: "button", class: "small" }, told, make("span", { class: "unseen" }, ` ${what}`));
  button.addEventListener("click", async () => {
    const isCopied = await copy(textOf());
    told.textContent = isCopied ? "Copied" : "Not copied";
    byId("said", HTMLElement).textContent = isCopied ? `Copied ${what}.` : "The browser did not let the page copy.";
    setTimeout(() => (told.textContent = "Copy"), TOLD_MS);
  });
  return button;
}

/** @param {string} text @returns {Promise<boolean>} whether it worked */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // without TLS, browsers offer a clipboard to pages of this machine only
  }
}

/** @param {string} text */
function copyBySelection(text) {
  const focused = document.activeElement;
  const field = make("textarea", { class: "unseen", "aria-hidden": "true", readonly: "" });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  if (focused instanceof HTMLElement) focused.focus();
  return isCopied;
}

// @ts-check
// Making elements. Text becomes text nodes, always: what a model or a user writes is never read as HTML.

/**
 * Return a new element.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string>} [attributes]
 * @param {...(Node | string)} children strings become text nodes
 * @returns {HTMLElementTagNameMap[K]}
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/**
 * Return the element of the page with this id.
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} type
 * @returns {T}
 */
export function byId(id, type) {
  const element = document.getElementById(id);
  if (!(element instanceof type)) throw new Error(`the page has no ${type.name} #${id}`);
  return element;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const hundredths = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

/** @param {number} value @returns {string} three digits or so */
export function short(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 99.95) return whole.format(value);
  return value >= 9.995 ? tenths.format(value) : hundredths.format(value);
}

/** @param {number} share in [0, 1] @returns {string} */
export function percent(share) {
  return Number.isFinite(share) ? `${whole.format(100 * share)} %` : "–";
}

/** @param {number} ms @returns {string} with its unit */
export function duration(ms) {
  if (!Number.isFinite(ms)) return "–";
  return ms < 999.5 ? `${whole.format(ms)} ms` : `${short(ms / 1000)} s`;
}

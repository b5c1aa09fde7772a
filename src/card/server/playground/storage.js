// @ts-check
// What the browser keeps for this page: a browser may forbid it or have no room, and the page must still work.

/** @typedef {() => Storage} Area `() => localStorage` or `() => sessionStorage`: even naming one may be forbidden */

/**
 * @param {Area} area
 * @param {string} name
 * @returns {string} empty if there is nothing
 */
export function read(area, name) {
  try {
    return area().getItem(name) ?? "";
  } catch {
    return "";
  }
}

/**
 * Keep a value in place of the last one. Where it cannot be kept, the last one is gone too.
 * @param {Area} area
 * @param {string} name
 * @param {string} value empty to keep nothing
 */
export function write(area, name, value) {
  try {
    area().removeItem(name);
    if (value) area().setItem(name, value);
  } catch {
    // Then it holds until the page is left.
  }
}

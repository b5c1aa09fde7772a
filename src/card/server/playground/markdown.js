// @ts-check
// Markdown as elements. The parser only reads: its tokens become elements of the few kinds below, and all text becomes
// text nodes. The model's text never becomes HTML, so nothing in it can run, load or look like the page.

import { copyButton } from "./copy.js";
import { make } from "./dom.js";
import MarkdownIt from "./vendor/markdown-it.js";

/** @typedef {{type: string, tag: string, nesting: -1 | 0 | 1, hidden: boolean, content: string, info: string,
 *   children: Token[] | null, attrGet: (name: string) => string | null}} Token */

const PARSER = new /** @type {any} */ (MarkdownIt)({ html: false, linkify: false, typographer: false });
const BLOCKS = new Set(["p", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td"]);
const SPANS = new Set(["strong", "em", "s"]);
const LINKED = new Set(["http:", "https:", "mailto:"]);
const TITLE_LEVEL = 3; // of the heading above an answer: its own ones come below
const LOWEST_LEVEL = 6;

/**
 * Return a text as Markdown means it.
 * @param {string} text
 * @returns {HTMLElement}
 */
export function formatted(text) {
  const root = make("div", { class: "formatted" });
  build(PARSER.parse(text, {}), root);
  return root;
}

/**
 * @param {Token[]} tokens
 * @param {HTMLElement} root
 */
function build(tokens, root) {
  const open = [root];
  for (const token of tokens) {
    const parent = open[open.length - 1];
    if (token.hidden) continue;
    if (token.type === "inline") {
      build(token.children ?? [], parent);
    } else if (token.nesting === 1) {
      const element = opened(token);
      parent.append(element.tagName === "TABLE" ? scrolling("Table", element) : element);
      open.push(element);
    } else if (token.nesting === -1) {
      open.pop();
    } else {
      parent.append(leaf(token));
    }
  }
}

/** @param {Token} token @returns {HTMLElement} */
function opened(token) {
  const { tag } = token;
  if (token.type === "heading_open") {
    const level = Math.min(LOWEST_LEVEL, TITLE_LEVEL + Number(tag.slice(1)));
    return make(/** @type {"h4" | "h5" | "h6"} */ (`h${level}`));
  }
  if (token.type === "link_open") return link(token.attrGet("href"));
  if (!BLOCKS.has(tag) && !SPANS.has(tag)) return make("span");
  const element = make(/** @type {"p"} */ (tag));
  const start = token.attrGet("start");
  if (start) element.setAttribute("start", start);
  const side = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "")?.[1];
  if (side) element.style.textAlign = side;
  return element;
}

/** @param {Token} token @returns {Node} */
function leaf(token) {
  switch (token.type) {
    case "softbreak":
    case "hardbreak":
      return make("br");
    case "hr":
      return make("hr");
    case "code_inline":
      return make("code", {}, token.content);
    case "fence":
    case "code_block":
      return codeBlock(token);
    case "image": {
      const image = link(token.attrGet("src")); // never loaded: its address alone could leak the text
      image.append(`Image: ${token.content || "without a description"}`);
      return image;
    }
    default:
      return document.createTextNode(token.content);
  }
}

/** @param {Token} token */
function codeBlock({ content, info }) {
  const language = info.trim().split(/\s+/)[0];
  const code = scrolling("Code", make("pre", {}, make("code", {}, content)));
  const head = make("div", { class: "code-head" }, make("span", {}, language), copyButton("the code", () => content));
  return make("div", { class: "code" }, head, code);
}

/**
 * @param {string} label
 * @param {HTMLElement} wide what may be wider than the answer: it scrolls, by the keyboard too
 */
function scrolling(label, wide) {
  return make("div", { class: "scrolling", role: "group", "aria-label": label, tabindex: "0" }, wide);
}

/** @param {string | null} address @returns {HTMLElement} a link only if it leads out of this page by a known way */
function link(address) {
  if (!address || !URL.canParse(address) || !LINKED.has(new URL(address).protocol)) return make("span");
  return make("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" });
}

// @ts-check
// Runs before the page is painted, so that it never flashes in the other theme; all other scripts are modules.
"use strict";

try {
  const chosen = localStorage.getItem("card.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Without storage the page follows the system.
}

// LaTeX as MathML. The source is shown until the library is loaded, and where it is not understood.

import { h } from "../dom.js";

const LONGEST = 4000; // characters of a formula
const BOUNDS = { trust: false, maxExpand: 200, maxSize: [40, 400], throwOnError: true };

let library = null; // loaded with the first formula

export function math(text, displayMode) {
  const box = h("code", { class: displayMode ? "math display" : "math" }, text);
  if (text.length <= LONGEST) show(box, text, displayMode);
  return displayMode ? h("div", { class: "formula", tabindex: "0" }, box) : box;
}

async function show(box, text, displayMode) {
  try {
    library ??= import("./temml.min.js");
    const { default: temml } = await library;
    const made = h("span");
    temml.render(text, made, { ...BOUNDS, displayMode });
    made.firstChild.setAttribute("aria-label", text);
    box.replaceWith(made.firstChild);
  } catch {
    // the source stays
  }
}

// Elements without markup: text given here is text, whatever it looks like.

// h("p", {class: "x", onclick: f, "aria-label": "y"}, "text", child, [more])
export function h(tag, props, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "open") made[name] = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat(9).filter((c) => c !== null && c !== undefined && c !== false));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, props, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Paths of a 16 x 16 grid, drawn as lines.
const ICONS = {
  plus: "M8 3v10M3 8h10",
  close: "M4 4l8 8M12 4l-8 8",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  send: "M8 13V3.5M4 7l4-4 4 4",
  stop: "M5 5h6v6H5z",
  copy: "M5.5 5.5h7v8h-7zM10.5 5.5v-3h-7v8h2",
  check: "M3 8.5l3.2 3.2L13 4.8",
  edit: "M3 13l.6-2.8L10.8 3 13 5.2 5.8 12.4z",
  again: "M13 8a5 5 0 1 1-1.6-3.7M13 2.5v3h-3",
  bin: "M3 4.5h10M6.5 4.5v-2h3v2M4.5 4.5l.5 9h6l.5-9",
  down: "M8 3v9.5M4 9l4 4 4-4",
  left: "M10 3.5L5.5 8l4.5 4.5",
  right: "M6 3.5L10.5 8 6 12.5",
  sliders: "M2.5 5h6M12 5h1.5M2.5 11H4M7.5 11h6M10.2 3.3a1.7 1.7 0 1 0 0 3.4 1.7 1.7 0 0 0 0-3.4M5.8 9.3a1.7 1.7 0 1 0 0 3.4 1.7 1.7 0 0 0 0-3.4",
  sun: "M8 5.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6M8 1.5v1.2M8 13.3v1.2M1.5 8h1.2M13.3 8h1.2M3.4 3.4l.9.9M11.7 11.7l.9.9M12.6 3.4l-.9.9M4.3 11.7l-.9.9",
  moon: "M13 9.6A5.4 5.4 0 0 1 6.4 3 5.4 5.4 0 1 0 13 9.6z",
  auto: "M8 2.5a5.5 5.5 0 1 0 0 11zM8 2.5a5.5 5.5 0 0 1 0 11",
  key: "M5.2 7.8a2.9 2.9 0 1 0 0 5.8 2.9 2.9 0 0 0 0-5.8M7.3 8.7l5.9-5.9M10.6 5.4l2 2",
  tool: "M6 3C4 3 5.6 7.5 3.5 8 5.6 8.5 4 13 6 13M10 3c2 0 .4 4.5 2.5 5-2.1.5-.5 5-2.5 5",
  clip: "M12.5 7.2l-5 5a3 3 0 0 1-4.2-4.2l5.4-5.4a2 2 0 0 1 2.8 2.8l-5.2 5.2a1 1 0 0 1-1.4-1.4l4.6-4.6",
  save: "M8 2.5v7M5 7l3 3 3-3M3 13.5h10",
  play: "M5 3.5l7 4.5-7 4.5z",
  file: "M4 2h5l3 3v9H4zM9 2v3h3",
  more: "M3.5 8h.01M8 8h.01M12.5 8h.01",
};

export function icon(name) {
  const path = svg("path", { d: ICONS[name] });
  return svg("svg", { viewBox: "0 0 16 16", class: `icon icon-${name}`, "aria-hidden": "true" }, path);
}

// A button that is an icon alone: `label` says what it does.
export function iconButton(name, label, onclick, props) {
  const own = { type: "button", class: "icon-button", "aria-label": label, title: label };
  return h("button", { ...own, onclick, ...props }, icon(name));
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // only secure pages have a clipboard: plain HTTP needs the old API
    const area = h("textarea", { class: "off-screen", value: text, "aria-hidden": "true" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

// A copy button; for a moment its icon shows that it worked.
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const done = await copyText(text());
    button.replaceChildren(icon(done ? "check" : "close"));
    say(done ? "Copied" : "The browser did not allow copying");
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

// Offers a text as a file.
export function saveFile(name, type, text) {
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// What a screen reader says next.
export function say(words) {
  document.getElementById("spoken").textContent = words;
}

let toastTimer = 0;

// A line at the bottom for some seconds, with one thing that can be done about it.
export function toast(words, action, act) {
  const box = document.getElementById("toast");
  const hide = () => box.replaceChildren();
  const button = action && h("button", { type: "button", class: "link", onclick: () => (hide(), act()) }, action);
  box.replaceChildren(h("div", { class: "toast" }, h("span", null, words), button));
  clearTimeout(toastTimer);
  toastTimer = setTimeout(hide, action ? 8000 : 4000);
}

export function bytes(count) {
  if (count === undefined || count === null || Number.isNaN(count)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) [count, unit] = [count / 1024, unit + 1];
  return `${unit && count < 100 ? count.toFixed(count < 10 ? 2 : 1) : Math.round(count)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 0.9995) return `${Number((value * 1000).toFixed(value < 0.01 ? 1 : 0))} ms`;
  if (value < 60) return `${Number(value.toFixed(value < 10 ? 2 : 1))} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function count(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

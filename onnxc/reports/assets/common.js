"use strict";
// What all reports share: elements, numbers, themes, tabs, tables, plots. Strings of the data become text nodes only.

const report = { data: JSON.parse(document.getElementById("data").textContent) };

function show(id) {
  return document.getElementById(id);
}

// An element: el("td", {class: "number", onclick: f}, "text", other).
function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.flat(3).filter((child) => child !== undefined && child !== null && child !== "").map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

function fill(host, ...children) {
  host.replaceChildren(...children.flat(3).filter((child) => child !== undefined && child !== null && child !== ""));
  return host;
}

// In a narrow window the details lie below all else: a press that fills them leads there.
let pressed = -Infinity;
for (const kind of ["pointerup", "keyup"]) addEventListener(kind, () => (pressed = performance.now()), true);
new MutationObserver(() => {
  if (performance.now() - pressed < 800 && matchMedia("(max-width: 1000px)").matches) show("aside").scrollIntoView({ block: "start" });
}).observe(show("aside"), { childList: true });

addEventListener("error", (event) => fault(event.message));
addEventListener("unhandledrejection", (event) => fault(String(event.reason)));

function fault(message) {
  const place = show("fault");
  place.hidden = false;
  place.textContent = `A part of this page could not be drawn: ${message}`;
}

// ---------------------------------------------------------------- numbers

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function scaled(value, step, prefixes) {
  let k = 0;
  let left = Math.abs(value);
  while (left >= step * 0.9995 && k < prefixes.length - 1) {
    left /= step;
    k += 1;
  }
  const digits = left >= 100 || (k === 0 && Number.isInteger(left)) ? 0 : left >= 10 ? 1 : 2;
  return `${value < 0 ? "-" : ""}${left.toFixed(digits)} ${prefixes[k]}`;
}

const bytes = (value) => (isNumber(value) ? scaled(value, 1024, ["", "K", "M", "G", "T"]) + "B" : value ? `${value} B` : "");
const counted = (value) => (isNumber(value) ? scaled(value, 1000, ["", "K", "M", "G", "T", "P"]).trim() : value ? String(value) : "");
const flops = (value) => (isNumber(value) ? scaled(value, 1000, ["", "K", "M", "G", "T", "P"]) + "FLOP" : value ? `${value} FLOP` : "");
const percent = (value) => (isNumber(value) ? `${(value * 100).toFixed(value < 0.0995 ? 1 : 0)} %` : "");
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function seconds(value) {
  if (!isNumber(value)) return "";
  if (value === 0) return "0";
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toPrecision(3)} ms`;
  return `${(value * 1e6).toPrecision(3)} µs`;
}

function small(value) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0";
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// ---------------------------------------------------------------- themes

const theme = { listeners: [], order: ["auto", "light", "dark"], now: "auto" };

// A colour of the style sheet, as what a canvas takes.
function colour(name) {
  if (!theme.probe) theme.probe = document.body.appendChild(el("span", { hidden: true }));
  theme.probe.style.color = `var(--${name})`;
  return getComputedStyle(theme.probe).color;
}

function setTheme(name) {
  theme.now = name;
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  show("theme").textContent = `Theme: ${name}`;
  try {
    localStorage.setItem("onnxc-theme", name);
  } catch {
    // no storage for this page: the choice lasts as long as it is open
  }
  theme.listeners.forEach((redraw) => redraw());
}

function startTheme() {
  let stored = null;
  try {
    stored = localStorage.getItem("onnxc-theme");
  } catch {
    stored = null;
  }
  const wanted = new URLSearchParams(location.hash.slice(1)).get("theme") || stored;
  show("theme").addEventListener("click", () => setTheme(theme.order[(theme.order.indexOf(theme.now) + 1) % 3]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme.listeners.forEach((redraw) => redraw()));
  setTheme(theme.order.includes(wanted) ? wanted : "auto");
}

// ---------------------------------------------------------------- tabs

const tabs = { all: {}, now: "" };

// Adds a tab. `draw` is called with its section when the tab is first looked at.
function addTab(name, title, draw) {
  const section = el("section", { class: "tab", id: `tab-${name}`, role: "tabpanel", hidden: true });
  const button = el("button", { type: "button", role: "tab", "aria-selected": "false", onclick: () => openTab(name) }, title);
  tabs.all[name] = { section, button, draw, drawn: false };
  show("tabs").append(button);
  show("sections").append(section);
}

function openTab(name) {
  if (!tabs.all[name]) return;
  for (const [key, tab] of Object.entries(tabs.all)) {
    tab.section.hidden = key !== name;
    tab.button.setAttribute("aria-selected", String(key === name));
  }
  const tab = tabs.all[name];
  tabs.now = name;
  if (!tab.drawn) {
    tab.drawn = true;
    tab.draw(tab.section);
  }
  const wanted = new URLSearchParams(location.hash.slice(1));
  wanted.set("tab", name);
  history.replaceState(null, "", `#${wanted}`);
  dispatchEvent(new Event("resize"));
}

function startTabs() {
  const wanted = new URLSearchParams(location.hash.slice(1)).get("tab");
  openTab(tabs.all[wanted] ? wanted : Object.keys(tabs.all)[0]);
}

function tile(value, caption, tone) {
  return el("div", { class: `tile ${tone || ""}` }, el("b", {}, value), el("span", {}, caption));
}

// ---------------------------------------------------------------- plots

// A plot whose options `make` gives; made anew for another theme. `chosen` is called with the data of what is clicked.
function plot(host, make, chosen) {
  const chart = plots.init(host);
  const draw = () => chart.setOption(make(), { notMerge: true });
  draw();
  theme.listeners.push(draw);
  new ResizeObserver(() => host.clientWidth && chart.resize()).observe(host);
  if (chosen) chart.on("click", chosen);
  return { chart, draw };
}

const text = () => ({ color: colour("quiet"), fontSize: 11.5 });

function axis(name, more) {
  return {
    name, nameLocation: "middle", nameGap: 30, nameTextStyle: text(), axisLabel: text(),
    axisLine: { lineStyle: { color: colour("line") } }, splitLine: { lineStyle: { color: colour("line"), opacity: 0.6 } },
    axisTick: { lineStyle: { color: colour("line") } }, ...more,
  };
}

// Tooltips are elements, made of text.
function tooltip(lines) {
  return {
    trigger: "item", confine: true, backgroundColor: colour("card"), borderColor: colour("line"),
    textStyle: { color: colour("ink"), fontSize: 12.5 },
    formatter: (item) => el("div", {}, (lines(item) || []).filter(Boolean).map((line, k) => el("div", { style: k ? "" : "font-weight:600" }, short(String(line), 110)))),
  };
}

const grid = (more) => ({ left: 62, right: 18, top: 26, bottom: 46, ...more });

function zooming() {
  return [{ type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false }];
}

// ---------------------------------------------------------------- tables

const cellText = (render) => (cell) => {
  const made = render(cell.getValue(), cell.getRow().getData());
  return made instanceof Node ? made : document.createTextNode(made ?? "");
};

// A table with a search field. Columns: {title, field, show(value, row), right, width, grow}.
function table(host, columns, rows, options) {
  const { chosen, search, sort, empty, filters } = { search: () => "", ...options };
  const field = el("input", { type: "search", placeholder: "Filter", "aria-label": "Filter the table" });
  const count = el("span", { class: "count" });
  const place = el("div");
  host.append(el("div", { class: "bar" }, field, (filters || []).map((f) => f.element), count), place);
  const number = (a, b) => (isNumber(a) ? a : -Infinity) - (isNumber(b) ? b : -Infinity);
  const made = new tables.Tabulator(place, {
    data: rows, index: "key", layout: "fitColumns", maxHeight: "68vh", nestedFieldSeparator: false, selectableRows: chosen ? 1 : false,
    placeholder: empty || "Nothing", initialSort: sort ? [{ column: sort[0], dir: sort[1] }] : [],
    columns: columns.map((c) => ({
      title: c.title, field: c.field, hozAlign: c.right ? "right" : "left", headerHozAlign: c.right ? "right" : "left", width: c.width,
      widthGrow: c.grow || 1, minWidth: c.least || 50, formatter: cellText(c.show || ((value) => value)),
      sorter: c.right || c.numeric ? number : "alphanum", headerSortStartingDir: c.right ? "desc" : "asc",
    })),
  });
  const state = { made, ready: false };
  const shown = () => {
    count.textContent = `${made.getDataCount("active")} of ${rows.length}`;
  };
  const apply = () => {
    if (!state.ready) return;
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const tests = (filters || []).map((f) => f.test);
    made.setFilter((row) => {
      const all = search(row).toLowerCase();
      return words.every((word) => all.includes(word)) && tests.every((test) => test(row));
    });
    shown();
  };
  field.addEventListener("input", apply);
  (filters || []).forEach((f) => f.element.addEventListener("input", apply));
  made.on("tableBuilt", () => {
    state.ready = true;
    apply();
  });
  if (chosen) made.on("rowClick", (event, row) => chosen(row.getData()));
  state.mark = (key) => {
    if (!state.ready) return;
    made.deselectRow();
    if (made.getRow(key)) made.selectRow(key);
  };
  return state;
}

// A small table that does not scroll.
function listing(headings, rows, right) {
  const cell = (tag, value, k) => el(tag, { class: (right || []).includes(k) ? "number" : "" }, value);
  const made = el("table", { class: "small" }, el("thead", {}, el("tr", {}, headings.map((h, k) => cell("th", h, k)))), el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, k) => cell("td", value, k))))));
  return el("div", { style: "overflow-x: auto" }, made);
}

function copied(value) {
  const button = el("button", { type: "button", title: "Copy" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(value);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed here";
    }
  });
  return button;
}

// The first frame after all is drawn: what a test waits for.
function finished() {
  requestAnimationFrame(() => {
    document.documentElement.dataset.drawn = String(Math.round(performance.now()));
  });
}

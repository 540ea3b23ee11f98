"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const plots = [];

// Elements without markup: names come from files.
function el(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const colour = (at) => getComputedStyle(root).getPropertyValue("--c" + at).trim();
const named = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

// Numbers as people read them.
function short(value, unit) {
  if (value == null || Number.isNaN(value)) return "";
  const size = Math.abs(value);
  for (const [scale, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= scale) return +(value / scale).toPrecision(3) + "\u00a0" + prefix + unit;
  return +value.toPrecision(3) + (unit ? "\u00a0" + unit : "");
}
function time(ns) {
  if (ns == null) return "";
  for (const [scale, unit] of [[3.6e12, "h"], [6e10, "min"], [1e9, "s"], [1e6, "ms"], [1e3, "µs"]])
    if (ns >= scale && (unit !== "min" || ns >= 3e11)) return +(ns / scale).toPrecision(3) + "\u00a0" + unit;
  return +ns.toPrecision(3) + "\u00a0ns";
}
const percent = (value) => (value == null ? "" : value.toFixed(1) + "\u00a0%");

function table(heads, rows) {
  const head = el("tr", {}, ...heads.map((text) => el("th", { scope: "col" }, text)));
  const body = rows.map((row) =>
    el("tr", {}, ...row.map((text, at) => (at ? el("td", {}, text) : el("th", { scope: "row" }, text)))));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" },
    el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}
function folded(name, content) {
  return el("details", {}, el("summary", {}, name), content);
}

// A plot that is made again when the theme changes, and follows the width of its place.
function plot(place, options, data, height) {
  let drawn = null;
  const kept = { make() {
    if (drawn) drawn.destroy();
    drawn = new uPlot(options({ width: Math.max(place.clientWidth, 200), height, padding: [null, 28, null, null] }), data, place);
    kept.drawn = drawn;
  } };
  kept.make();
  new ResizeObserver(() => {
    const width = Math.max(place.clientWidth, 200);
    if (width !== drawn.width) drawn.setSize({ width, height });
  }).observe(place);
  plots.push(kept);
  return kept;
}
function axes(xs, ys) {
  const look = { stroke: named("soft"), grid: { stroke: named("line"), width: 1 }, ticks: { stroke: named("line"), width: 1 } };
  return [
    { ...look, values: (_, all) => all.map((value) => (value == null ? "" : xs(value))), space: 70, size: 34 },
    { ...look, values: (_, all) => all.map((value) => (value == null ? "" : ys(value))), size: 68 },
  ];
}

const wish = matchMedia("(prefers-color-scheme: dark)");
function show(theme) {
  root.dataset.theme = theme;
  document.getElementById("theme").setAttribute("aria-pressed", String(theme === "dark"));
  for (const kept of plots) kept.make();
}
show(wish.matches ? "dark" : "light");
wish.addEventListener("change", () => show(wish.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => show(root.dataset.theme === "dark" ? "light" : "dark"));

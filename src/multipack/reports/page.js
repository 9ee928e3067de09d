"use strict";
// Helpers of all pages. Text of data becomes text nodes only, never markup.
const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const COLORS = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const color = (index) => COLORS[index % COLORS.length];
const redraws = [];
let width = 0;
new ResizeObserver(() => {
  if (page.clientWidth !== width) { width = page.clientWidth; redraws.forEach((draw) => draw()); }
}).observe(page);

function add(parent, tag, attributes = {}, text = "") {
  const svg = parent instanceof SVGElement || tag === "svg";
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== "") made.textContent = text;
  parent.append(made);
  return made;
}

function section(title, note = "") {
  const made = add(page, "section");
  add(made, "h2", {}, title);
  if (note) add(made, "p", { class: "soft" }, note);
  return made;
}

// 12345 → 12.3k; four significant digits at most.
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= unit) return `${Number((value / (name === "k" ? 1e3 : unit)).toPrecision(3))}${name}`;
  if (size >= 100) return Number(value.toPrecision(4)).toLocaleString("en-US");
  return size !== 0 && size < 1e-3 ? value.toExponential(1).replace("e-", "e−") : String(Number(value.toPrecision(4)));
}
const percent = (value, digits = 1) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`);

function tiles(parent, pairs) {
  const box = add(parent, "div", { class: "tiles" });
  for (const [name, value] of pairs) {
    const tile = add(box, "div", { class: "tile" });
    add(tile, "b", {}, value);
    add(tile, "span", {}, name);
  }
}

function table(parent, heads, rows) {
  const box = add(add(parent, "div", { class: "scroll" }), "table");
  if (heads.length) heads.forEach((head) => add(box.rows[0] || add(box, "tr"), "th", {}, head));
  for (const cells of rows) {
    const row = add(box, "tr");
    cells.forEach((cell) => add(row, "td", {}, String(cell)));
  }
  return box;
}

function keys(parent, names) {
  const box = add(parent, "div", { class: "keys" });
  names.forEach(([name, paint]) => {
    const key = add(box, "span", { class: "key" });
    add(key, "i").style.background = paint;
    key.append(name);
  });
}

function ticks(low, high, count, log) {
  if (log) {
    const found = [];
    const decades = Math.log10(high / low);
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const digit of decades > 3 ? [1] : decades > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8])
        if (digit * 10 ** power >= low * 0.999 && digit * 10 ** power <= high * 1.001) found.push(digit * 10 ** power);
    const every = Math.ceil(found.length / (count + 2));
    if (found.length > 1) return found.filter((_, index) => index % every === 0);
  }
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((digit) => digit * power >= rough) || 10);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  return found;
}

// Draws axes into a new SVG of `box`. Returns the scales and what a chart needs to draw and to answer the pointer.
function frame(box, xs, ys, { height = 190, logX = false, logY = false, format = short, xName = "step" } = {}) {
  box.replaceChildren();
  const full = Math.max(box.clientWidth, 120), left = 52, right = 10, top = 10, bottom = 32;
  const svg = add(box, "svg", { viewBox: `0 0 ${full} ${height}`, height, role: "img" });
  const scale = (low, high, log, from, to) => {
    const change = log ? Math.log10 : Number, a = change(low), b = change(high);
    return (value) => from + ((change(value) - a) / (b - a || 1)) * (to - from);
  };
  const x = scale(...xs, logX, left, full - right), y = scale(...ys, logY, height - bottom, top);
  for (const value of ticks(...ys, Math.max(3, Math.floor(height / 44)), logY)) {
    add(svg, "line", { x1: left, x2: full - right, y1: y(value), y2: y(value), stroke: "var(--grid)" });
    add(svg, "text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, format(value));
  }
  for (const value of ticks(...xs, Math.max(3, Math.floor((full - left) / 80)), logX))
    add(svg, "text", { x: x(value), y: height - bottom + 15, "text-anchor": "middle" }, short(value));
  add(svg, "text", { x: full - right, y: height - 3, "text-anchor": "end" }, xName);
  return { svg, x, y, left, top, full, height, bottom: height - bottom, right: full - right };
}

// Shows `rows(x)`, an array of [name, text, color], beside the pointer; `nearest(x)` snaps to a position with data.
function hover(box, axes, nearest, rows) {
  const line = add(axes.svg, "line", { y1: axes.top, y2: axes.bottom, stroke: "var(--soft)", visibility: "hidden" });
  let tip = null;
  const leave = () => { line.setAttribute("visibility", "hidden"); if (tip) tip.remove(); tip = null; };
  axes.svg.addEventListener("pointerleave", leave);
  axes.svg.addEventListener("pointermove", (event) => {
    const at = nearest(event.clientX - axes.svg.getBoundingClientRect().left);
    if (at === null) return;
    const place = axes.x(at);
    line.setAttribute("visibility", "visible"); line.setAttribute("x1", place); line.setAttribute("x2", place);
    if (!tip) tip = add(box, "div", { class: "tip" });
    tip.replaceChildren();
    add(tip, "div", { class: "soft" }, `step ${at.toLocaleString("en-US")}`);
    for (const [name, text, paint] of rows(at)) add(tip, "div", {}, `${name} ${text}`).style.color = paint;
    const room = axes.full - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(place + 12 > room ? place - tip.offsetWidth - 12 : place + 12, room))}px`;
  });
}

const finite = (values) => values.filter((value) => value !== null && Number.isFinite(value));
function range(values, zero) {
  if (!values.length) return [0, 1];
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (zero) low = Math.min(low, 0);
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [zero && low === 0 ? 0 : low - room, high + room];
}

function path(axes, xs, ys) {
  let text = "", pen = false;
  for (let i = 0; i < xs.length; i++) {
    if (ys[i] === null || !Number.isFinite(axes.y(ys[i])) || !Number.isFinite(axes.x(xs[i]))) { pen = false; continue; }
    text += `${pen ? "L" : "M"}${axes.x(xs[i]).toFixed(1)} ${axes.y(ys[i]).toFixed(1)}`;
    pen = true;
  }
  return text;
}

// Exponential moving average, corrected for its start; gaps stay gaps.
function smooth(ys, weight) {
  let mean = 0, total = 0;
  return ys.map((y) => {
    if (y === null) return null;
    mean = weight * mean + (1 - weight) * y; total = weight * total + (1 - weight);
    return mean / total;
  });
}

// Lines of series {name, x, y, color, dash, dots, raw}; `raw` is drawn faintly behind.
function lines(box, series, options = {}) {
  const shown = series.filter((each) => each.x.length);
  const { logX, logY } = options;
  const xs = finite(shown.flatMap((each) => each.x)).filter((value) => !logX || value > 0);
  const ys = finite(shown.flatMap((each) => each.y.concat(each.raw || []))).filter((value) => !logY || value > 0);
  let bounds = range(ys, options.zero && !logY);
  if (logY && ys.length) bounds = [Math.min(...range(ys).filter((v) => v > 0), ys.reduce((a, b) => Math.min(a, b)) * 0.97), ys.reduce((a, b) => Math.max(a, b)) * 1.03];
  let across = xs.length ? [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))] : [0, 1];
  if (across[0] === across[1]) across = logX ? [across[0] * 0.9, across[0] * 1.1] : [across[0] - 1, across[0] + 1];
  const axes = frame(box, across, bounds, options);
  const line = (each, ys, opacity) => add(axes.svg, "path", { d: path(axes, each.x, ys), fill: "none", stroke: each.color,
    "stroke-width": 1.8, opacity, "stroke-dasharray": each.dash || "none", "stroke-linejoin": "round" });
  for (const each of shown) {
    if (each.raw) line(each, each.raw, 0.22);
    line(each, each.y, 1);
    if (each.dots || each.x.length === 1) each.x.forEach((x, i) => { if (each.y[i] !== null && !(logX && x <= 0)) add(axes.svg, "circle", { cx: axes.x(x), cy: axes.y(each.y[i]), r: 3, fill: each.color }); });
  }
  for (const [x, name] of options.marks || []) if (x >= across[0] && x <= across[1])
    add(add(axes.svg, "line", { x1: axes.x(x), x2: axes.x(x), y1: axes.top, y2: axes.bottom, stroke: "var(--soft)", "stroke-dasharray": "2 3", opacity: 0.7 }), "title", {}, name);
  const all = [...new Set(xs)].sort((a, b) => a - b);
  hover(box, axes, (place) => all.length ? all.reduce((a, b) => Math.abs(axes.x(b) - place) < Math.abs(axes.x(a) - place) ? b : a) : null,
    (at) => shown.flatMap((each) => { const i = each.x.indexOf(at); return i < 0 || each.y[i] === null ? [] : [[each.name, (options.format || short)(each.y[i]), each.color]]; }));
}

// Areas on top of each other; `series` share `x`.
function areas(box, x, series, options = {}) {
  const sums = x.map(() => 0), tops = [];
  for (const each of series) { each.y.forEach((y, i) => { sums[i] += Math.max(y || 0, 0); }); tops.push([...sums]); }
  const last = x[x.length - 1];
  const axes = frame(box, x.length > 1 ? [x[0], last] : [last - 1, last + 1], [0, range(sums, true)[1]], options);
  series.forEach((each, k) => {
    const below = k ? tops[k - 1] : x.map(() => 0);
    const d = path(axes, x, tops[k]) + path(axes, [...x].reverse(), [...below].reverse()).replace("M", "L") + "Z";
    add(axes.svg, "path", { d, fill: each.color, opacity: 0.85 });
  });
  hover(box, axes, (place) => x.reduce((a, b) => Math.abs(axes.x(b) - place) < Math.abs(axes.x(a) - place) ? b : a),
    (at) => [...series].reverse().map((each) => [each.name, (options.format || short)(each.y[x.indexOf(at)]), each.color]));
}

// A card with a title and a chart; `draw(box)` draws it, now and whenever the width changes. Returns [card, redraw].
function card(parent, title, draw, wide = false) {
  const made = add(parent, "div", { class: wide ? "card wide" : "card" });
  add(made, "h3", {}, title);
  const box = add(made, "div", { class: "chart" });
  const redraw = () => draw(box);
  redraws.push(redraw);
  return [made, redraw, box];
}

// The page of `multipack plan --picture FILE.html`: the values of `plan_view`.
const RAMP = [[68, 1, 84], [65, 68, 135], [42, 120, 142], [34, 168, 132], [122, 209, 81], [253, 231, 37]]; // viridis
const whole = (value) => value.toLocaleString("en-US");
function ramp(share) {
  const at = Math.max(0, Math.min(share, 1)) * (RAMP.length - 1), i = Math.min(Math.floor(at), RAMP.length - 2);
  return `rgb(${RAMP[i].map((a, k) => Math.round(a + (RAMP[i + 1][k] - a) * (at - i))).join(",")})`;
}
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
function canvas(box, height) {
  const made = box.querySelector("canvas") || add(box, "canvas"), scale = devicePixelRatio || 1;
  made.width = Math.max(box.clientWidth, 120) * scale;
  made.height = height * scale;
  made.style.height = `${height}px`;
  const pen = made.getContext("2d");
  pen.scale(scale, scale);
  return [pen, made.width / scale];
}

add(page, "h1", {}, data.title);
add(page, "p", { class: "soft" }, data.headline);
tiles(page, [["documents", whole(data.documents)], ["tokens", short(data.tokens)],
  [`packs, at least ${whole(data.minimum_packs)}`, whole(data.packs)], [`global steps, at least ${whole(data.minimum_steps)}`, whole(data.steps)],
  [`padding in random batches of ${data.batch_size}`, percent(1 - data.padded_share)],
  ...(data.dropped_documents ? [["documents dropped", whole(data.dropped_documents)]] : []), ...(data.carried_documents ? [["carried to the next epoch", whole(data.carried_documents)]] : [])]);

// Documents fall from padded batches into packs. The picture is a function of the time, 0 to 1.
const total = (values) => values.reduce((a, b) => a + b, 0);
const blocks = data.blocks, count = blocks.length.length, tokens = total(blocks.length), used = total(blocks.added);
const steps = blocks.steps === 1 ? "the first step" : `the first ${whole(blocks.steps)} steps`;
const some = blocks.packs < blocks.all_packs ? `; ${whole(blocks.packs)} packs, evenly spaced of ${whole(blocks.all_packs)}, are drawn` : "";
const fall = section("Documents fall into packs", `The ${whole(count)} documents of ${steps}${some}. Color: length.`);
const controls = add(fall, "div", { class: "controls" });
const play = add(controls, "button", { type: "button" }, "pause");
const time = add(controls, "input", { type: "range", min: 0, max: 1, step: 0.001, value: 0, "aria-label": "time" });
const low = Math.log(blocks.length.reduce((a, b) => Math.min(a, b))), high = Math.log(blocks.length.reduce((a, b) => Math.max(a, b)));
const paints = blocks.length.map((length) => ramp((Math.log(length) - low) / (high - low || 1)));
const tallest = blocks.longest.reduce((a, b) => Math.max(a, b));
function drawFall(box) {
  const above = 150, gap = 64, below = 230, [pen, full] = canvas(box, 24 + above + gap + below + 8);
  const ink = style("--soft"), free = style("--free"), wide = full / count, pack = full / blocks.packs, now = Number(time.value);
  const shrink = (size) => Math.max(size - (size >= 4 ? 1 : 0), 0.3);
  pen.font = "12.5px system-ui, sans-serif";
  pen.fillStyle = ink;
  const write = (text, y) => { while (text.length > 8 && pen.measureText(text).width > full) text = `${text.slice(0, -2)}…`; pen.fillText(text, 0, y); };
  write(`batches of ${data.batch_size}, padded to the longest: ${percent(1 - tokens / blocks.padded_slots)} padding (gray)`, 14);
  write(`${whole(blocks.packs)} packs of ${whole(data.capacity)} tokens: ${percent(1 - used / (blocks.packs * data.capacity), 2)} free`, 24 + above + gap - 8);
  pen.fillStyle = free;
  blocks.longest.forEach((length, batch) => {
    const first = batch * data.batch_size, last = Math.min(first + data.batch_size, count), tall = (length / tallest) * above;
    pen.fillRect(first * wide, 24 + above - tall, shrink((last - first) * wide), tall);
  });
  const top = 24 + above + gap;
  for (let k = 0; k < blocks.packs; k++) pen.fillRect(k * pack, top, shrink(pack), below);
  for (let i = 0; i < count; i++) {
    const place = blocks.place[i], start = (0.8 * place) / count;
    let share = Math.max(0, Math.min((now - start) / 0.2, 1));
    share = share * share * (3 - 2 * share);
    const tall = (blocks.length[i] / tallest) * above, tall2 = (blocks.added[i] / data.capacity) * below;
    const from = [place * wide, 24 + above - tall, shrink(wide), tall];
    const to = [blocks.pack[i] * pack, top + below - (blocks.below[i] / data.capacity) * below - tall2, shrink(pack), tall2 >= 5 ? tall2 - 1 : tall2];
    pen.globalAlpha = 1;
    pen.fillStyle = paints[i];
    pen.fillRect(...from.map((value, k) => value + (to[k] - value) * share));
    if (share > 0) { pen.globalAlpha = 0.3; pen.fillRect(...from); }
  }
  pen.globalAlpha = 1;
}
const [fallCard, redrawFall] = card(fall, "before and after", drawFall, true);
if (blocks.packs < blocks.all_packs) add(fallCard, "small", {}, "The whole plan is in the report; only this picture leaves packs out.");
let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches, before = null;
if (!playing) time.value = 1;
function label() { play.textContent = playing ? "pause" : Number(time.value) >= 1 ? "play again" : "play"; }
function tick(stamp) {
  if (!playing) return;
  if (before !== null) time.value = Math.min(Number(time.value) + (stamp - before) / 7000, 1);
  before = stamp;
  redrawFall();
  if (Number(time.value) >= 1) playing = false;
  label();
  if (playing) requestAnimationFrame(tick);
}
function start() { playing = true; before = null; label(); requestAnimationFrame(tick); }
play.addEventListener("click", () => {
  if (playing) { playing = false; label(); return; }
  if (Number(time.value) >= 1) time.value = 0;
  start();
});
time.addEventListener("input", () => { playing = false; label(); redrawFall(); });
label();
if (playing) start();

// Packs whose documents share their beginnings: documents side by side, and below each node those that go on.
if (data.trees.length) {
  const box = section("Beginnings computed once", `Packs of the first step. A column is a document, from its first token down; what documents share is one block. Color: documents that share it.`);
  const most = Math.max(...data.trees.map((tree) => Math.max(...tree.nodes.map((node) => node[1])))), paint = (rows) => ramp(Math.log(rows) / (Math.log(most) || 1));
  for (const tree of data.trees) {
    const some = tree.rows < tree.documents ? `, the first ${tree.rows} are drawn` : "";
    card(box, `${whole(tree.documents)} documents, ${whole(tree.tokens)} tokens in ${whole(tree.slots)} slots, ${whole(tree.deepest)} tokens deep${some}`, (chart) => {
      chart.replaceChildren();
      const full = Math.max(chart.clientWidth, 120), tall = 220, wide = full / tree.rows, deep = tall / tree.deepest;
      const svg = add(chart, "svg", { viewBox: `0 0 ${full} ${tall}`, height: tall, role: "img" });
      for (const [first, rows, start, length] of tree.nodes)
        add(add(svg, "rect", { x: first * wide, y: start * deep, width: Math.max(rows * wide - 1, 0.5), height: Math.max(length * deep - 1, 0.5), fill: paint(rows) }), "title", {},
          `${whole(length)} tokens from place ${whole(start)}, of ${whole(rows)} document${rows > 1 ? "s" : ""}`);
    }, true);
  }
  keys(box, [["1 document", paint(1)], ...(most > 2 ? [[`${Math.round(Math.sqrt(most))} documents`, paint(Math.round(Math.sqrt(most)))]] : []), [`${whole(most)} documents`, paint(most)]]);
}

// Dials
const dials = add(section("Fill, balance, randomness", "The line is the proven ceiling of these documents (of randomness: the window of the planner). Shares are on a scale of nines: 90 %, 99 % and 99.9 % are equally far apart."), "div", { class: "grid" });
for (const dial of data.dials) card(dials, dial.name, (box) => {
  box.replaceChildren();
  const full = Math.max(box.clientWidth, 120), size = Math.min(full / 2 - 34, 110), x = full / 2, y = size + 26;
  const svg = add(box, "svg", { viewBox: `0 0 ${full} ${y + 24}`, height: y + 24, role: "img" });
  const point = (share, radius) => [x - radius * Math.cos(Math.PI * share), y - radius * Math.sin(Math.PI * share)].map((v) => v.toFixed(1)).join(" ");
  const arc = (share, paint) => add(svg, "path", { d: `M${point(0, size)}A${size} ${size} 0 0 1 ${point(share, size)}`, fill: "none", stroke: paint, "stroke-width": 14 });
  arc(1, "var(--free)");
  if (dial.value > 0) arc(dial.value, "var(--c0)");
  add(svg, "path", { d: `M${point(dial.ceiling, size - 13)}L${point(dial.ceiling, size + 13)}`, stroke: "var(--c1)", "stroke-width": 2.5 });
  for (const [at, text] of dial.marks) { const [tx, ty] = point(at, size + 18).split(" "); add(svg, "text", { x: tx, y: Number(ty) + 3, "text-anchor": "middle" }, text); }
  add(svg, "text", { x, y: y - 8, "text-anchor": "middle", style: "font-size: 21px; font-weight: 650; fill: var(--ink)" }, dial.shown);
  add(box, "small", {}, dial.text);
});

// Cost over ranks and steps
const heat = data.heat, cells = heat.cost.flat(2), least = cells.reduce((a, b) => Math.min(a, b)), most = cells.reduce((a, b) => Math.max(a, b));
if (data.ranks > 1) {
  const each = heat.micro_batches > 1 ? `, ${heat.micro_batches} micro-batches in each` : "";
  const box = section("Cost over ranks and steps", `${whole(heat.steps.length)} of ${whole(data.steps)} steps, evenly spaced${each}. Cost of a pack over the mean pack. The mark is the slowest rank of its step.`);
  const [heatCard] = card(box, `${whole(data.ranks)} ranks (rows) × steps (columns)`, (chart) => {
    const tall = Math.max(Math.min(data.ranks * 22, 420), 60), [pen, full] = canvas(chart, tall);
    const wide = full / (heat.steps.length * heat.micro_batches), row = tall / data.ranks;
    heat.cost.forEach((micro, s) => micro.forEach((ranks, m) => ranks.forEach((cost, r) => {
      pen.fillStyle = ramp((cost - least) / (most - least || 1));
      pen.fillRect((s * heat.micro_batches + m) * wide, r * row, wide + 0.4, row + 0.4);
    })));
    const span = wide * heat.micro_batches;
    pen.strokeStyle = "#ff6a00"; pen.lineWidth = 2;
    heat.slowest_rank.forEach((rank, s) => pen.strokeRect(s * span + 1, rank * row + 1, Math.max(span - 2, 1), Math.max(row - 2, 1)));
    if (heat.micro_batches > 1 && span > 6) { pen.fillStyle = style("--card"); heat.steps.forEach((_, s) => pen.fillRect(s * span - 0.5, 0, 1, tall)); }
  }, true);
  keys(heatCard, [[`${short(least)} of the mean`, ramp(0)], [short((least + most) / 2), ramp(0.5)], [short(most), ramp(1)], ["slowest rank", "#ff6a00"]]);
  const [lineCard] = card(box, "imbalance: what a step waits for over the mean of its ranks, minus 1", (chart) => lines(chart, [
    { name: "proven lower bound", x: heat.steps, y: heat.least.map((v) => 100 * (v - 1)), color: "var(--c1)", dash: "5 3" },
    { name: "this plan", x: heat.steps, y: heat.slowest.map((v) => 100 * (v - 1)), color: "var(--c0)" }], { zero: true, format: (v) => `${short(v)} %` }), true);
  keys(lineCard, [["this plan", "var(--c0)"], ["proven lower bound for the step's documents", "var(--c1)"]]);
}

// Lengths
const bars = data.histogram, lengths = section("Lengths");
card(lengths, "documents by length in tokens; dashed: capacity", (box) => {
  const last = Math.max(bars.edges[bars.edges.length - 1], data.capacity), highest = bars.counts.reduce((a, b) => Math.max(a, b));
  const axes = frame(box, [bars.edges[0], last * 1.05], [0, highest * 1.05], { logX: true, height: 220, xName: "tokens" });
  bars.counts.forEach((number, i) => add(add(axes.svg, "rect", { x: axes.x(bars.edges[i]), y: axes.y(number), height: axes.bottom - axes.y(number),
    width: Math.max(axes.x(bars.edges[i + 1]) - axes.x(bars.edges[i]) - 1, 0.5), fill: "var(--c0)" }), "title", {}, `${whole(bars.edges[i])} to ${whole(bars.edges[i + 1] - 1)} tokens: ${whole(number)} documents`));
  add(axes.svg, "line", { x1: axes.x(data.capacity), x2: axes.x(data.capacity), y1: axes.top, y2: axes.bottom, stroke: "var(--c1)", "stroke-width": 2, "stroke-dasharray": "5 3" });
}, true);

const report = section("Report");
table(report, [], data.rows);
add(report, "pre", { class: "card" }, data.command);
add(page, "p", { class: "soft" }, data.made);

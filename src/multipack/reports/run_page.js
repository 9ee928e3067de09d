// The page of `multipack report`: `data.runs`, each with columns of steps and evaluations.
const runs = data.runs.map((run, index) => ({ ...run, color: color(index), dash: DASHES[Math.floor(index / COLORS.length) % DASHES.length] }));
const one = runs.length === 1;
const first = runs[0];

function series(table, name, scale = 1) {
  // Names of metrics are a run's own: one may be "constructor", which every object inherits.
  return runs.filter((run) => Object.hasOwn(run[table], name)).map((run) => ({
    name: one ? "" : run.name, color: run.color, dash: run.dash, x: run[table].step,
    y: run[table][name].map((value) => (value === null ? null : value * scale)) }));
}

// A row of each setting; returns [name, row].
function settingsTable(parent, settings) {
  const box = table(parent, one ? [] : ["setting", ...runs.map((run) => run.name)], []);
  box.parentElement.classList.add("long");
  return settings.map(([key, differs, ...values]) => {
    const row = add(box, "tr");
    add(row, "th", {}, key);
    values.forEach((value) => add(row, "td", differs ? { class: "differs" } : {}, value));
    return [key, row];
  });
}

add(page, "h1", {}, data.title);
add(page, "p", { class: "soft" }, data.subtitle);
if (!one) keys(page, runs.map((run) => [run.name, run.color]));
if (one) tiles(page, first.tiles);
else {
  const box = table(page, ["", ...runs.map((run) => run.name)], []);
  const figures = runs.map((run) => Object.fromEntries(run.tiles));
  for (const name of new Set(runs.flatMap((run) => run.tiles.map(([each]) => each)))) {
    const row = add(box, "tr");
    add(row, "th", {}, name);
    figures.forEach((values, index) => { add(row, "td", {}, values[name] ?? "–").style.color = runs[index].color; });
  }
}

// What several runs have in common is said once.
const warned = new Map();
for (const run of runs) for (const text of run.warnings) warned.set(text, [...(warned.get(text) ?? []), run.name]);
for (const [text, names] of warned)
  add(page, "p", { class: "warn" }, names.length === runs.length ? text : `${names.join(", ")}: ${text}`);

// Differences
const differing = data.config.filter(([, differs]) => differs);
if (!one && differing.length)
  settingsTable(section("Settings that differ"), differing.map(([key, , ...values]) => [key, false, ...values]));

// Loss
const loss = section("Loss");
const controls = add(loss, "div", { class: "controls" });
const label = add(controls, "label", {}, "smoothing ");
const slider = add(label, "input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0.6 });
const toggle = (name) => { const box = add(controls, "label"), input = add(box, "input", { type: "checkbox" }); box.append(` ${name}`); input.addEventListener("change", () => drawLoss()); return input; };
const logX = toggle("log steps"), logY = toggle("log loss");
const shownName = (name) => name.replace("val_loss", "validation");
const [lossCard, drawLoss] = card(loss, "training (line) and validation (dots)", (box) => {
  const weight = Number(slider.value);
  const training = series("steps", "loss").map((each) => ({ ...each, name: `${each.name} training`, raw: weight ? each.y : null, y: weight ? smooth(each.y, weight) : each.y }));
  const validation = data.validation.flatMap((name, index) => series("evals", name).map((each) => ({
    ...each, name: `${each.name} ${shownName(name)}`, dots: true, dash: each.dash || "5 3", color: one ? color(index + 1) : each.color })));
  const marks = one ? first.sessions.filter((each) => each.step > 0 && each.event === "start").map((each) => [each.step, `resumed after step ${each.step}`]) : [];
  lines(box, [...training, ...validation], { height: 320, logX: logX.checked, logY: logY.checked, marks });
}, true);
if (one && data.validation.length) keys(lossCard, [["training", color(0)], ...data.validation.map((name, index) => [shownName(name), color(index + 1)])]);
slider.addEventListener("input", () => drawLoss());
if (data.mean_of > 1) add(lossCard, "small", {}, `each point of a curve is the mean of up to ${data.mean_of} steps`);

// Small charts
const progress = add(section("Steps"), "div", { class: "grid" });
const zeros = [];
for (const chart of data.charts) {
  const drawn = series("steps", chart.key), known = finite(drawn.flatMap((each) => each.y));
  if (known.length && known.every((value) => value === 0)) zeros.push(chart.title);
  else if (known.length)
    card(progress, chart.title, (box) => lines(box, series("steps", chart.key, chart.percent ? 100 : 1), { zero: chart.zero, format: chart.percent ? (v) => `${short(v)} %` : short }));
}
for (const name of data.evaluated)
  card(progress, `${name.replace("val_", "validation ").replaceAll("_", " ")}, at evaluations`, (box) => lines(box, series("evals", name).map((each) => ({ ...each, dots: true }))));
if (zeros.length) add(page.lastChild, "small", {}, `0 in every step: ${zeros.join("; ")}`);

// Time of a step
const timed = runs.filter((run) => run.parts.length);
if (timed.length) {
  const box = add(section("Where the time of a step goes", data.parts_note), "div", { class: one ? "" : "grid" });
  for (const run of timed) {
    const order = { "waiting for data": 3, forward: 4, backward: 0, communication: 1, optimizer: 2, other: 5 };
    const paints = run.parts.map(([name]) => color(order[name]));
    const [made] = card(box, one ? "seconds per step" : run.name, (chart) => areas(chart, run.steps.step, run.parts.map(([name, key], index) => ({ name, y: run.steps[key], color: paints[index] })), { height: 230 }));
    keys(made, run.parts.map(([name, , share], index) => [`${name} ${percent(share)}`, paints[index]]));
  }
}

// Padding and plan
const padded = runs.filter((run) => run.padding.length);
if (padded.length) {
  const box = section("What padding would have cost", "Random batches of documents padded to the longest of each batch, beside the packs of this run.");
  for (const run of padded) {
    if (!one) add(box, "h3", {}, run.name);
    const most = Math.max(...run.padding.map((each) => each.slots));
    for (const each of run.padding) {
      add(box, "div", {}, each.text);
      const bar = add(box, "div", { class: "bar", title: each.text });
      bar.style.width = `${(100 * each.slots) / most}%`;
      add(bar, "i").style.width = `${(100 * each.tokens) / each.slots}%`;
    }
    if (run.padding_note) add(box, "p", {}, run.padding_note);
  }
  keys(box, [["tokens of documents", "var(--c0)"], ["padding", "var(--free)"]]);
}
const planned = runs.filter((run) => run.plan.length);
if (planned.length) {
  const box = section("Plan", "Fill, balance and randomness of the first epoch, beside their proven bounds.");
  for (const run of planned) { if (!one) add(box, "h3", {}, run.name); table(box, [], run.plan); }
}

// Samples
const sampled = runs.filter((run) => run.samples.length);
if (sampled.length) {
  const box = section("Samples through training");
  for (const run of sampled) {
    const control = add(box, "label", { class: "controls" }, one ? "" : run.name), text = add(box, "pre", { class: "card" });
    const choose = add(control, "input", { type: "range", min: 0, max: run.samples.length - 1, value: run.samples.length - 1 });
    const at = add(control, "span");
    const show = () => {
      const [step, sample] = run.samples[Number(choose.value)], [prompt, ...rest] = sample.split("▌");
      at.textContent = `after step ${step.toLocaleString("en-US")}`;
      text.replaceChildren();
      add(text, "span", { class: "soft" }, prompt);
      add(text, "span", {}, rest.join("▌"));
    };
    choose.addEventListener("input", show);
    show();
  }
}

// Checkpoints and processes
const kept = runs.filter((run) => run.checkpoints.length || run.sessions.length);
if (kept.length) {
  const box = section("Checkpoints and processes");
  for (const run of kept) {
    if (!one) add(box, "h3", {}, run.name);
    if (run.checkpoints.length) table(box, ["checkpoint", "size", ""], run.checkpoints);
    if (run.sessions.length) table(box, ["process", "step", "time (UTC)", ""], run.sessions.map((each) => [each.event, each.step, each.time, each.text]));
  }
}

// Configuration
const settings = section("Configuration", one ? "" : "Settings that differ are marked.");
const search = add(settings, "input", { type: "search", placeholder: "filter, e.g. optimizer", "aria-label": "filter settings" });
const rows = settingsTable(settings, data.config);
search.addEventListener("input", () => rows.forEach(([key, row]) => { row.hidden = !key.includes(search.value.trim()); }));
for (const run of runs) if (run.facts.length) {
  add(settings, "h3", {}, one ? "as started" : `${run.name}, as started`).style.marginTop = "18px";
  table(settings, [], run.facts);
}
add(page, "p", { class: "soft" }, data.made);

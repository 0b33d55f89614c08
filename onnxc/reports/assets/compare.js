"use strict";
// The page of `compare`: the verdict, error along the depth of the model, the graph coloured by the error that each node
// introduces, and tables.

const data = report.data;
const found = data.comparison;
const layers = found.layers.map((layer, key) => ({ ...layer, key }));
const view = { graph: null, table: null };
const [ours, theirs] = found.sides;

const verdicts = {
  equal: { tone: "heat0", plot: "plot6", chip: "good", says: "every element is the same" },
  rounding: { tone: "tone1", plot: "plot1", chip: "good", says: "no more than rounding explains" },
  "theirs worse": { tone: "tone3", plot: "plot3", chip: "", says: `${theirs} is further from float64 than rounding explains` },
  "ours worse": { tone: "heat2", plot: "plot2", chip: "warn", says: `${ours} differs by more than rounding explains` },
  wrong: { tone: "heat3", plot: "plot4", chip: "bad", says: "no rounding explains it" },
  skipped: { tone: "paper", plot: "plot6", chip: "", says: "not compared" },
};
const of = (verdict) => verdicts[verdict] || verdicts.skipped;
const chip = (verdict) => el("span", { class: `chip ${of(verdict).chip}` }, verdict);
// Of what rounding explains, a layer that uses much is shown apart.
const large = (layer) => layer.verdict === "rounding" && isNumber(layer.introduced) && layer.bound > 0 && layer.introduced > 0.3 * layer.bound;
const toneOf = (layer) => (large(layer) ? "heat1" : of(layer.verdict).tone);
const fails = (layer) => layer.verdict === "wrong" || layer.verdict === "ours worse";
const error = (value) => (value === null || value === undefined ? "not finite" : small(value));
const optional = (value) => (value === null || value === undefined ? "" : small(value));
const link = (title, act) => el("button", { type: "button", class: "link", onclick: act }, title);
const typed = (thing) => `${thing.dtype}[${thing.shape.join(", ")}]`;

// ---------------------------------------------------------------- the top

function drawTop() {
  const bad = layers.filter(fails);
  const culprit = bad[0];
  const judged = found.outputs.filter((o) => !o.agrees);
  show("about").textContent = [`${ours} against ${theirs}`, plural(found.samples, "sample"), isNumber(found.seed) ? `seed ${found.seed}` : "", `tolerance ${small(found.rtol)} relative, ${small(found.atol)} of the largest value`].filter(Boolean).join(" · ");
  const tone = found.agree ? "good" : found.verdict === "wrong" ? "bad" : "warn";
  fill(show("tiles"),
    tile(found.agree ? "Agrees" : "Differs", `${found.verdict}: ${of(found.verdict).says}`, tone),
    tile(`${found.outputs.length - judged.length} of ${found.outputs.length}`, "outputs agree", judged.length ? "bad" : "good"),
    layers.length ? tile(plural(layers.length, "layer"), bad.length ? `${bad.length} ${bad.length === 1 ? "introduces" : "introduce"} more than rounding explains` : "none introduces more than rounding explains", bad.length ? "bad" : "good") : "",
    culprit ? tile(`n${culprit.node} ${culprit.op_type}`, `the first at fault: ${short(culprit.name, 60)}`, "bad") : "",
    found.first_nonfinite ? tile(short(found.first_nonfinite.name, 30), `has the first NaN or infinity (${found.first_nonfinite.side})`, "warn") : "",
    found.reduction ? tile(found.reduction.culprit || "not found", `what ${found.reduction.kind} lead to`, found.reduction.culprit ? "bad" : "") : "");
}

// ---------------------------------------------------------------- details

function facts(rows) {
  return el("dl", { class: "facts" }, rows.filter(([, value]) => value !== "" && value !== null && value !== undefined).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function special(side) {
  if (!side) return "";
  const parts = [[side.nan, "NaN"], [side.posinf, "+∞"], [side.neginf, "−∞"]].filter(([n]) => n).map(([n, what]) => `${n} ${what}`);
  return parts.length ? `${parts.join(", ")}${side.first ? `, the first at [${side.first.join(", ")}]` : ""}` : "";
}

function histogram(metrics) {
  const bins = Object.entries(metrics.ulp_histogram || {}).map(([low, n]) => [Number(low), n]).sort((a, b) => a[0] - b[0]);
  if (!bins.length) return "";
  const host = el("div", { style: "height: 190px" });
  const name = (low) => (low < 2 ? String(low) : `${counted(low)}–${counted(2 * low - 1)}`);
  requestAnimationFrame(() => plot(host, () => ({
    animation: false, grid: grid({ left: 56, bottom: 62, top: 12 }), tooltip: tooltip((item) => [`${name(bins[item.dataIndex][0])} ulp`, plural(item.value, "element")]),
    xAxis: axis("units in the last place", { type: "category", data: bins.map(([low]) => name(low)), nameGap: 46, axisLabel: { ...text(), rotate: bins.length > 6 ? 45 : 0 } }),
    yAxis: axis("", { type: "log", min: 0.5, axisLabel: { ...text(), formatter: (v) => (v < 1 ? "" : counted(v)) } }), series: [{ type: "bar", data: bins.map(([, n]) => n || null), barMinHeight: 3, color: colour("plot0") }],
  })));
  return [el("h3", {}, "Elements by their difference in ulp"), host];
}

function measured(m) {
  if (!m) return "";
  const quantiles = Object.entries(m.abs_quantiles || {}).map(([q, value]) => [`${Number((Number(q) * 100).toFixed(3))} %`, small(value), optional((m.ulp_quantiles || {})[q])]);
  return [
    facts([
      ["largest difference", `${error(m.max_abs)}${m.worst ? ` at [${m.worst.join(", ")}]` : ""}`], ["relative to the largest", error(m.max_rel)], ["mean difference", error(m.mean_abs)], ["rms, relative", error(m.rms_rel)],
      ["largest in ulp", optional(m.ulp_max)], ["cosine", isNumber(m.cosine) ? m.cosine.toPrecision(9) : ""], ["signal to noise", isNumber(m.snr_db) ? `${m.snr_db.toFixed(1)} dB` : ""],
      ["elements apart", m.mismatches || ""], ["zeros of other sign", m.zero_signs || ""], ["first place agrees", percent(m.top1)], ["first five agree", percent(m.top5)], [`not finite in ${ours}`, special(m.ours)], [`not finite in ${theirs}`, special(m.theirs)],
    ]),
    quantiles.length ? [el("h3", {}, "Quantiles"), listing(["of elements", "difference below", "ulp below"], quantiles, [1, 2])] : "", histogram(m),
  ];
}

function drawLayer(layer) {
  const [mine, other] = layer.errors64 || [];
  fill(show("aside"),
    el("h2", {}, `n${layer.node} ${layer.op_type}`), el("p", {}, chip(layer.verdict), " ", layer.note || of(layer.verdict).says), layer.origin ? el("div", { class: "mono note" }, layer.origin, " ", copied(layer.origin)) : "",
    facts([
      ["tensor", el("code", {}, layer.name)], [`in ${ours}`, layer.ours_name && layer.ours_name !== layer.name ? el("code", {}, layer.ours_name) : ""], ["node", el("code", {}, layer.node_name)], ["type", el("code", {}, typed(layer))], ["depth", layer.depth],
      ["nodes in this layer", layer.layer.length > 1 ? layer.layer.map((n) => `n${n}`).join(" ") : ""], ["seen", { output: "as an output", stored: "stored by a kernel", inside: "from inside of a kernel" }[layer.tap] || layer.tap], ["sample", found.samples > 1 ? layer.sample : ""],
      ["error", layer.verdict === "skipped" ? "" : error(layer.error)], ["introduced here", optional(layer.introduced)], ["came in", optional(layer.inherited)], ["rounding explains", optional(layer.bound)],
      ["to float64", layer.errors64 ? `${ours} ${error(mine)}, ${theirs} ${error(other)}` : ""],
    ]),
    measured(layer.metrics));
  show("aside").scrollTop = 0;
}

function drawOutput(output) {
  fill(show("aside"), el("h2", {}, `Output ${output.name}`), el("p", {}, chip(output.verdict), " ", output.note || of(output.verdict).says),
    facts([["type", el("code", {}, typed(output))], ["sample", found.samples > 1 ? output.sample : ""], ["to float64", output.errors64 ? `${ours} ${error(output.errors64[0])}, ${theirs} ${error(output.errors64[1])}` : ""], ["rounding explains", optional(output.bound)]]), measured(output.metrics));
  show("aside").scrollTop = 0;
}

function drawNode(node) {
  const layer = layers.find((l) => l.layer.includes(node.number));
  fill(show("aside"), el("h2", {}, `n${node.number} ${node.op_type}`), el("p", {}, el("code", {}, node.name)), node.line ? el("div", { class: "mono note" }, node.line, " ", copied(node.line)) : "",
    el("p", { class: "note" }, layer ? ["It is seen in the layer of ", link(`n${layer.node} ${layer.op_type}`, () => choose(layer.key))] : "Its tensors were not compared."));
}

function choose(key) {
  const layer = layers[key];
  drawLayer(layer);
  if (view.graph) view.graph.select(layer.node, tabs.now === "graph");
  if (view.table) view.table.mark(key);
}

// ---------------------------------------------------------------- error along the depth

function drawDepth(host) {
  const seen = layers.filter((l) => l.verdict !== "skipped");
  host.append(el("h2", {}, "Error along the model, relative to each tensor's largest value"));
  if (!seen.length) return host.append(el("div", { class: "empty" }, layers.length ? "No layer could be compared." : "Only the outputs were compared: onnxc compare MODEL --layers --html FILE"));
  const place = host.appendChild(el("div", { class: "plot tall" }));
  const values = seen.flatMap((l) => [l.error, l.introduced, l.bound]).filter((v) => isNumber(v) && v > 0);
  const high = values.length ? 10 ** (Math.ceil(Math.log10(Math.max(...values))) + 1) : 1;
  // Beside the largest, what is so small is drawn as none: where a mask is of the largest float, errors are 1e-40.
  const least = Math.max(Math.min(...values), 1e-8 * high);
  const low = values.length ? 10 ** (Math.floor(Math.log10(least)) - 1) : 1e-9;
  const at = (value) => (value === null || value === undefined ? high : Math.max(value, low));
  const line = (name, value, tone, type) => ({ name, type: "line", data: seen.map((l) => (value(l) === undefined ? null : at(value(l)))), symbol: "none", lineStyle: { width: 1.6, type }, color: colour(tone), connectNulls: true });
  plot(place, () => ({
    animation: false, grid: grid({ left: 70, top: 40 }), dataZoom: zooming(), legend: { top: 4, textStyle: text(), inactiveColor: colour("line") },
    tooltip: tooltip((item) => {
      const l = seen[item.dataIndex];
      return [`n${l.node} ${l.op_type}: ${l.verdict}`, l.name, `error ${error(l.error)}`, l.introduced === null ? "" : `introduced ${small(l.introduced)}, came in ${optional(l.inherited)}`, l.bound === null ? "" : `rounding explains ${small(l.bound)}`];
    }),
    xAxis: axis("layers, in the order of the model", { type: "category", data: seen.map((l) => `n${l.node}`) }), yAxis: axis("", { type: "log", min: low, max: high, axisLabel: { ...text(), formatter: (v) => (v <= low * 1.01 ? "0" : small(v)) } }),
    series: [
      line("error", (l) => l.error, "plot0", "solid"), line("rounding explains", (l) => (l.bound === null ? undefined : l.bound), "plot6", "dashed"),
      { name: "introduced", type: "scatter", color: colour("plot1"), data: seen.map((l) => (l.introduced === null ? null : { value: at(l.introduced), symbol: fails(l) ? "diamond" : "circle", symbolSize: fails(l) ? 15 : 6, itemStyle: { color: colour(of(l.verdict).plot) } })) },
    ],
  }), (item) => choose(seen[item.dataIndex].key));
  host.append(el("p", { class: "note" }, "Dots are the error that a layer makes itself, given our own inputs; the line is what is there after it. Diamonds are more than rounding explains. Tensors that are equal, or nearly so, lie at the bottom, what is not finite at the top. Click for the details; Ctrl and the wheel zoom."));
  return undefined;
}

function outputsTable(host) {
  host.append(el("h2", {}, "Outputs"));
  table(host, [
    { title: "Verdict", field: "verdict", show: chip, width: 118 }, { title: "Output", field: "name", grow: 2, least: 100 }, { title: "Type", field: "type", grow: 2, least: 100 }, ...(found.samples > 1 ? [{ title: "Sample", field: "sample", right: true, width: 84 }] : []),
    { title: "Largest difference", field: "max_abs", right: true, show: error, width: 150 }, { title: "Relative", field: "max_rel", right: true, show: error, width: 96 }, { title: "Why", field: "note", grow: 3, least: 120 },
  ], found.outputs.map((o, key) => ({ ...o, key, type: typed(o) })), { chosen: (row) => drawOutput(row), search: (row) => `${row.name} ${row.type} ${row.verdict} ${row.note}`, empty: "The model has no outputs" });
}

function drawOverview(section) {
  drawDepth(section.appendChild(el("div", { class: "card" })));
  outputsTable(section.appendChild(el("div", { class: "card" })));
  const reduction = found.reduction;
  if (reduction) {
    section.append(el("div", { class: "card" }, el("h2", {}, `Reduced by ${reduction.kind}`), facts([["culprit", reduction.culprit || "not found"], ["nodes left", reduction.nodes.map((n) => `n${n}`).join(" ")], ["model", reduction.model ? el("code", {}, reduction.model) : ""], ["inputs", reduction.inputs ? el("code", {}, reduction.inputs) : ""], ["to see it again", reduction.command ? [el("code", {}, reduction.command), " ", copied(reduction.command)] : ""]]),
      reduction.steps.length ? el("details", {}, el("summary", {}, plural(reduction.steps.length, "step")), el("ul", { class: "plain" }, reduction.steps.map((s) => el("li", {}, s)))) : ""));
  }
  const stages = Object.entries(found.seconds || {});
  if (found.notes.length || stages.length) section.append(el("div", { class: "card note" }, found.notes.map((note) => el("p", {}, note)), stages.length ? el("p", {}, stages.map(([name, s]) => `${name} ${seconds(s)}`).join(" · "), found.peak_bytes ? ` · at most ${bytes(found.peak_bytes)} of memory` : "") : ""));
}

// ---------------------------------------------------------------- layers, and the graph

function drawLayers(section) {
  const host = section.appendChild(el("div", { class: "card" }));
  const present = Object.keys(verdicts).filter((v) => layers.some((l) => l.verdict === v));
  const pick = el("select", { "aria-label": "Verdict" }, el("option", { value: "" }, "All verdicts"), present.map((v) => el("option", { value: v }, v)));
  const rows = layers.map((l) => ({ ...l, what: `n${l.node} ${l.op_type}`, type: typed(l), ratio: isNumber(l.introduced) && l.bound ? l.introduced / l.bound : null, ulp: l.metrics ? l.metrics.ulp_max : null, cosine: l.metrics ? l.metrics.cosine : null }));
  view.table = table(host, [
    { title: "#", field: "key", numeric: true, width: 58 }, { title: "Verdict", field: "verdict", show: chip, width: 118 }, { title: "Node", field: "what", grow: 2, least: 110 }, { title: "Tensor", field: "name", grow: 3, least: 90 },
    { title: "Error", field: "error", right: true, show: (v, row) => (row.verdict === "skipped" ? "" : error(v)), width: 88 }, { title: "Introduced", field: "introduced", right: true, show: optional, width: 122 }, { title: "Explained", field: "bound", right: true, show: optional, width: 118 },
    { title: "Ratio", field: "ratio", right: true, show: optional, width: 80 }, { title: "Ulp", field: "ulp", right: true, show: optional, width: 80 }, { title: "1 − cosine", field: "cosine", right: true, show: (v) => (isNumber(v) ? small(1 - v) : ""), width: 106 },
  ], rows, { chosen: (row) => choose(row.key), search: (row) => `n${row.node} ${row.op_type} ${row.node_name} ${row.name} ${row.type} ${row.verdict} ${row.origin} ${row.note} ${row.tap}`, filters: [{ element: pick, test: (row) => !pick.value || row.verdict === pick.value }], empty: "Only the outputs were compared" });
}

function graphOf() {
  const byNumber = new Map(data.graph.map((n) => [n.number, n]));
  const owner = new Map();
  const groups = new Map();
  const worst = (a, b) => (a && Object.keys(verdicts).indexOf(a.verdict) % 5 >= Object.keys(verdicts).indexOf(b.verdict) % 5 ? a : b);
  for (const layer of layers) {
    const known = groups.get(layer.node);
    if (known) known.layer = worst(known.layer, layer);
    else groups.set(layer.node, { id: layer.node, layer, members: [] });
  }
  for (const layer of layers) for (const number of layer.layer) if (!owner.has(number) && byNumber.has(number) && !(groups.has(number) && number !== layer.node)) owner.set(number, layer.node);
  for (const node of data.graph) {
    if (!owner.has(node.number)) {
      owner.set(node.number, node.number);
      if (!groups.has(node.number)) groups.set(node.number, { id: node.number, layer: null, members: [] });
    }
    groups.get(owner.get(node.number)).members.push(node);
  }
  const edges = new Map();
  for (const node of data.graph) {
    for (const from of node.reads) {
      const [a, b] = [owner.get(from), owner.get(node.number)];
      if (a !== undefined && a !== b) edges.set(`${a} ${b}`, { from: a, to: b, label: "", back: a > b });
    }
  }
  const made = [...groups.values()].filter((g) => g.members.length).map((g) => {
    const node = byNumber.get(g.id) || g.members[0];
    const inside = new Set(g.members.map((m) => m.number));
    return {
      id: g.id, layer: g.layer, node, label: `n${node.number} ${node.op_type}`, tone: g.layer ? toneOf(g.layer) : "paper",
      sub: g.layer && g.layer.verdict !== "skipped" ? (g.layer.introduced === null ? `error ${error(g.layer.error)}` : `introduces ${small(g.layer.introduced)}`) : "",
      search: `${g.layer ? `${g.layer.name} ${g.layer.verdict}` : ""} ${g.members.map((m) => `n${m.number} ${m.op_type} ${m.name} ${m.line}`).join(" ")}`,
      items: g.members.length > 1 ? g.members.map((m) => ({ id: m.number, label: `n${m.number} ${m.op_type}`, tone: "card", search: `${m.name} ${m.line}` })) : [],
      links: g.members.length > 1 ? g.members.flatMap((m) => m.reads.filter((from) => inside.has(from) && from < m.number).map((from) => [from, m.number])) : [],
    };
  });
  return { groups: made, edges: [...edges.values()] };
}

function drawGraph(section) {
  const host = section.appendChild(el("div", { class: "card" }));
  const { groups, edges } = graphOf();
  const present = Object.keys(verdicts).filter((v) => groups.some((g) => (g.layer ? g.layer.verdict : "skipped") === v));
  view.graph = new GraphView(host, groups, edges, {
    tones: [...present.map((v) => [verdicts[v].tone, `${v}: ${verdicts[v].says}`]), ...(layers.some(large) ? [["heat1", "more than 30 % of what rounding explains"]] : [])], label: "The model, coloured by the error that each layer introduces", openBelow: 0,
    chosen: (group, item) => (item ? drawNode(data.graph.find((n) => n.number === item.id)) : group.layer ? choose(group.layer.key) : drawNode(group.node)),
  });
  const culprit = layers.find(fails);
  if (culprit) view.graph.select(culprit.node, true);
}

startTheme();
drawTop();
fill(show("aside"), el("h2", {}, "Details"), el("p", { class: "note" }, "Click a dot, a row or a node: how far apart both sides are there, how the differences are distributed, and what decided the verdict."));
addTab("error", "Error", drawOverview);
addTab("layers", "Layers", drawLayers);
if (data.graph && data.graph.length) addTab("graph", "Graph", drawGraph);
startTabs();
{
  const culprit = layers.find(fails);
  if (culprit) choose(culprit.key);
  else if (found.outputs.length) drawOutput(found.outputs[0]);
}
finished();

"use strict";
// The pages of `explain` and `profile`: one page, which shows times where there are any.

const data = report.data;
const kernels = data.kernels;
const profile = data.profile || null;
const times = new Map((profile ? profile.kernels : []).map((k) => [k.number, k]));
const nodes = new Map(); // the model's nodes by number
const total = profile ? profile.kernels.reduce((sum, k) => sum + k.best, 0) : 0;
const view = { graph: null, kernelTable: null };

for (const kernel of kernels) {
  for (const origin of kernel.origins) {
    const key = origin.number;
    if (!nodes.has(key)) nodes.set(key, { ...origin, key, kernels: [] });
    nodes.get(key).kernels.push(kernel.number);
  }
}
for (const [number, op_type, name, line] of (data.passes || { nodes: [] }).nodes) {
  if (!nodes.has(number)) nodes.set(number, { number, op_type, name, line, key: number, kernels: [] });
}
for (const row of data.node_times || []) if (nodes.has(row.number)) nodes.get(row.number).seconds = row.seconds;

const kinds = [...new Set(kernels.map((k) => k.kind))].sort((a, b) => kernels.filter((k) => k.kind === b).length - kernels.filter((k) => k.kind === a).length);
const kindTone = (kind) => Math.min(kinds.indexOf(kind), 7);
const label = (kernel) => {
  const counts = new Map();
  for (const origin of kernel.origins) counts.set(origin.op_type, (counts.get(origin.op_type) || 0) + 1);
  return [...counts].map(([op, n]) => (n > 1 ? `${n}× ${op}` : op)).join(", ");
};
const countedLines = (lines) => {
  const counts = new Map();
  lines.forEach((line) => counts.set(line, (counts.get(line) || 0) + 1));
  return [...counts].map(([line, n]) => (n > 1 ? `${line} (${n} times)` : line));
};
const takers = new Map(); // "kernel store" -> kernels that read it
for (const kernel of kernels) {
  for (const take of kernel.takes) {
    const key = `${take.kernel} ${take.store}`;
    takers.set(key, [...(takers.get(key) || []), kernel.number]);
  }
}

// ---------------------------------------------------------------- the top

function drawTop() {
  const where = [data.gpu ? `GPU ${data.gpu}` : "", data.cpu && !data.gpu ? `CPU ${data.cpu}` : "", data.threads && !data.gpu ? plural(data.threads, "thread") : ""];
  const dims = profile ? Object.entries(profile.dims).map(([name, size]) => `${name} = ${size}`) : [];
  show("about").textContent = [...where, ...dims, profile ? `${plural(profile.runs, "run")} measured` : ""].filter(Boolean).join(" · ");
  const counts = data.counts;
  const memory = data.memory;
  const spent = Object.values(data.stages).reduce((a, b) => a + b, 0);
  const work = kernels.every((k) => isNumber(k.flops) && isNumber(k.turns)) ? kernels.reduce((sum, k) => sum + k.flops * k.turns, 0) : null;
  const computed = [...nodes.values()].filter((n) => n.kernels.length).length;
  fill(show("tiles"),
    profile ? tile(seconds(profile.total), `a run (median ${seconds(profile.median)})`) : "",
    profile && profile.peaks.flops && profile.flops ? tile(percent(profile.share_of_peak), `of ${counted(profile.peaks.flops)}FLOP/s, the peak`) : "",
    tile(plural(counts.kernels, "kernel"), `${counts.fused} fused loops, ${counts.templates} templates; ${counts.functions} distinct`),
    tile(String(computed), "nodes of the model in them"),
    work ? tile(flops(work), "in contractions") : "",
    isNumber(memory.arena) ? tile(bytes(memory.arena), `arena for ${bytes(memory.buffers_total)} in ${plural(memory.buffers, "value")}`) : tile(plural(memory.buffers, "value"), `in memory ${memory.arena}`),
    tile(bytes(memory.weights) || "none", "weights"),
    spent ? tile(seconds(spent), "to compile") : "",
    Object.entries(data.kept || {}).map(([reason, count]) => tile(plural(count, "node"), `stayed float32: ${reason}`, "warn")));
}

// ---------------------------------------------------------------- details of a kernel, or of a node

const link = (title, act) => el("button", { type: "button", class: "link", onclick: act }, title);
const kernelLink = (number) => (number < 0 ? el("span", {}, `input ${(data.inputs[-1 - number] || { name: "?" }).name}`) : link(`#${number}`, () => choose(number)));
const joined = (parts) => parts.flatMap((part, k) => (k ? [", ", part] : [part]));

function line(origin) {
  return origin.line ? el("div", { class: "mono note" }, origin.line, " ", copied(origin.line)) : "";
}

function nodeRow(origin, kernel) {
  const others = nodes.get(origin.number).kernels.filter((number) => number !== kernel.number);
  return el("li", {}, link(`n${origin.number} ${origin.op_type}`, () => chooseNode(origin.number)), " ", el("code", {}, origin.name), others.length ? el("div", { class: "note" }, "also in ", joined(others.slice(0, 12).map(kernelLink)), others.length > 12 ? ", …" : "") : "", line(origin));
}

function timing(kernel) {
  const time = times.get(kernel.number);
  if (!time) return [];
  const share = time.best / total;
  const bound = { compute: "arithmetic", memory: "memory", cache: "memory (from a cache)" }[time.bound];
  return [
    ["time", `${seconds(time.best)}, ${percent(share)} of all kernels (median ${seconds(time.median)})`],
    ["speed", `${counted(time.gflops * 1e9)}FLOP/s (${percent(time.compute)} of the peak), ${counted(time.gbs * 1e9)}B/s (${percent(time.memory)} of memory's)`],
    ["bound by", `${bound}, at ${percent(time.share)} of what that allows`],
  ];
}

function facts(rows) {
  return el("dl", { class: "facts" }, rows.filter(([, value]) => value).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function sourceOf(name) {
  const text = data.sources[name];
  if (text === undefined) return "";
  const whole = text.startsWith("(") ? (data.gpu ? `def ${name}${text}` : `static void ${name}${text}`) : text;
  return el("details", {}, el("summary", {}, `Generated source of ${name}`), copied(whole), el("pre", {}, whole));
}

function storeRow(kernel, boundary, k) {
  const readers = takers.get(`${kernel.number} ${k}`) || [];
  const outputs = data.outputs.filter((port) => port.source && port.source.kernel === kernel.number && port.source.store === k);
  const to = readers.length ? [" → ", joined(readers.slice(0, 12).map(kernelLink)), readers.length > 12 ? `, … (${readers.length} in all)` : ""] : "";
  return el("li", {}, el("code", {}, boundary.type), to, outputs.map((port) => el("span", {}, " → output ", el("code", {}, port.name))), boundary.reason ? el("div", { class: "note" }, boundary.reason) : "");
}

function choiceRow(choice) {
  if (!choice || choice.candidates.length < 2) return "";
  const others = choice.candidates.filter((c) => c !== choice.chosen);
  return [el("h3", {}, "Chosen among several ways"), el("p", {}, `${choice.chosen} for ${choice.subject}${choice.why ? `; ${choice.why}` : ""}`),
    el("details", {}, el("summary", {}, plural(others.length, "other")), el("ul", { class: "plain" }, others.map((c) => el("li", {}, c))))];
}

function stepsOf(kernel) {
  const rows = kernel.steps.map((step, k) => [String(k), step.op, step.type, step.reads.join(", "), step.nodes.map((n) => `n${n}`).join(" ")]);
  return rows.length ? el("details", {}, el("summary", {}, `${plural(rows.length, "primitive")} inside`), listing(["", "op", "type", "reads", "of"], rows)) : "";
}

function runsOf(kernel) {
  if (!profile || !profile.times || profile.times.length < 2) return "";
  const host = el("div", { style: "height: 130px" });
  const values = profile.times.map((run) => run[kernel.number] / 1e9);
  requestAnimationFrame(() => plot(host, () => ({
    animation: false, grid: grid({ top: 10, bottom: 34, left: 58 }), tooltip: tooltip((item) => [`run ${item.dataIndex + 1}`, seconds(item.value)]),
    xAxis: axis("run", { type: "category", nameGap: 20, data: values.map((_, k) => k + 1) }), yAxis: axis("", { type: "value", axisLabel: { ...text(), formatter: seconds }, splitNumber: 3 }),
    series: [{ type: "line", data: values, symbolSize: 4, lineStyle: { width: 1.5 }, color: colour("plot0") }],
  })));
  return [el("h3", {}, "Over the runs"), host];
}

function drawKernel(kernel) {
  const sources = [...new Set(kernel.takes.map((take) => take.kernel))];
  fill(show("aside"),
    el("div", { class: "head" }, el("h2", {}, `#${kernel.number} ${kernel.function}: ${kernel.kind}`), tabs.now === "graph" ? "" : el("button", { type: "button", onclick: () => inGraph(kernel.number) }, "In the graph")),
    el("p", {}, label(kernel) || "of no single node"),
    facts([
      ...timing(kernel),
      ["reads", [bytes(kernel.reads), kernel.weights ? ` (weights ${bytes(kernel.weights)})` : ""]], ["writes", bytes(kernel.writes)],
      ["arithmetic", [kernel.flops ? flops(kernel.flops) : "", kernel.pointwise ? `${kernel.flops ? " + " : ""}${counted(kernel.pointwise)} pointwise` : ""].join("")],
      ["calls", kernel.turns !== 1 ? String(kernel.turns) : ""], ["takes from", sources.length ? joined(sources.slice(0, 12).map(kernelLink)) : ""],
    ]),
    kernel.reasons.length ? [el("h3", {}, "Why these are together"), el("ul", { class: "plain" }, countedLines(kernel.reasons).map((reason) => el("li", {}, reason)))] : "",
    el("h3", {}, "What it stores, and why that does not stay inside"), el("ul", { class: "plain" }, kernel.boundaries.map((b, k) => storeRow(kernel, b, k))),
    choiceRow(kernel.choice), runsOf(kernel),
    el("h3", {}, "Nodes of the model"), el("ul", { class: "plain" }, kernel.origins.map((origin) => nodeRow(origin, kernel))),
    stepsOf(kernel), sourceOf(kernel.function));
  show("aside").scrollTop = 0;
}

function drawNode(node) {
  const steps = node.kernels.flatMap((number) => kernels[number].steps.filter((step) => step.nodes.includes(node.number)).map((step) => [kernelLink(number), step.op, step.type]));
  fill(show("aside"),
    el("h2", {}, `n${node.number} ${node.op_type}`), el("p", {}, el("code", {}, node.name)), line(node),
    facts([["kernels", node.kernels.length ? joined(node.kernels.slice(0, 30).map(kernelLink)) : "none: it was folded into constants, found twice, or not needed"], ["time", isNumber(node.seconds) ? `about ${seconds(node.seconds)}: its part of its kernels' work` : ""]]),
    steps.length ? [el("h3", {}, "What it became"), listing(["kernel", "primitive", "type"], steps)] : "",
    node.kernels.length === 1 ? sourceOf(kernels[node.kernels[0]].function) : "");
  show("aside").scrollTop = 0;
}

function drawPort(port) {
  const readers = port.input ? [...new Set(kernels.filter((k) => k.takes.some((t) => t.kernel === -1 - port.index)).map((k) => k.number))] : [];
  fill(show("aside"), el("h2", {}, `${port.input ? "Input" : "Output"} ${port.name}`), facts([["type", port.type], ["read by", readers.length ? joined(readers.map(kernelLink)) : ""], ["made by", port.source ? kernelLink(port.source.kernel) : ""]]));
}

function drawNothing() {
  fill(show("aside"), el("h2", {}, "Details"), el("p", { class: "note" }, "Click a kernel, a node, a bar or a row: what it computes and why, its source, and the lines of the model that it comes from."));
}

function choose(number) {
  drawKernel(kernels[number]);
  if (view.graph) view.graph.select(number, tabs.now === "graph");
  if (view.kernelTable) view.kernelTable.mark(number);
}

function chooseNode(number) {
  drawNode(nodes.get(number));
}

function inGraph(number) {
  openTab("graph");
  choose(number);
}

// ---------------------------------------------------------------- the graph

const colourings = {
  kind: { title: "by kind", tones: () => kinds.slice(0, 8).map((kind, k) => [`tone${k}`, k === 7 && kinds.length > 8 ? "others" : kind]), tone: (kernel) => `tone${kindTone(kernel.kind)}` },
  time: {
    title: "by time", tones: () => [["heat0", "below 1 % of a run"], ["heat1", "1 to 3 %"], ["heat2", "3 to 10 %"], ["heat3", "more than 10 %"]],
    tone: (kernel) => {
      const share = times.has(kernel.number) ? times.get(kernel.number).best / total : 0;
      return share >= 0.1 ? "heat3" : share >= 0.03 ? "heat2" : share >= 0.01 ? "heat1" : "heat0";
    },
  },
  limit: {
    title: "by how near to the machine's limit", tones: () => [["heat3", "below 10 % of what the machine allows"], ["heat2", "10 to 30 %"], ["heat1", "30 to 60 %"], ["tone1", "more"]],
    tone: (kernel) => {
      const share = times.has(kernel.number) ? times.get(kernel.number).share : 1;
      return share < 0.1 ? "heat3" : share < 0.3 ? "heat2" : share < 0.6 ? "heat1" : "tone1";
    },
  },
};

function itemsOf(kernel) {
  const owners = kernel.steps.map((step) => step.nodes[0]);
  const links = new Set();
  kernel.steps.forEach((step, k) => step.reads.forEach((from) => {
    if (owners[from] !== undefined && owners[k] !== undefined && owners[from] < owners[k]) links.add(`${owners[from]} ${owners[k]}`);
  }));
  const known = new Set(kernel.origins.map((o) => o.number));
  return {
    items: kernel.origins.map((o) => ({ id: o.number, label: `n${o.number} ${o.op_type}`, search: `${o.name} ${o.line}` })),
    links: [...links].map((pair) => pair.split(" ").map(Number)).filter(([a, b]) => known.has(a) && known.has(b)),
  };
}

function graphOf() {
  const groups = kernels.map((kernel) => {
    const time = times.get(kernel.number);
    return {
      id: kernel.number, kernel, label: `#${kernel.number} ${kernel.kind}${time ? ` · ${seconds(time.best)}` : ""}`, sub: label(kernel), ...itemsOf(kernel),
      search: `${kernel.function} ${kernel.origins.map((o) => `n${o.number} ${o.op_type} ${o.name} ${o.line}`).join(" ")} ${kernel.steps.map((s) => s.op).join(" ")}`,
    };
  });
  const edges = [];
  const types = new Map();
  for (const kernel of kernels) {
    const before = new Map();
    for (const take of kernel.takes) before.set(take.kernel, [...(before.get(take.kernel) || []), take.store]);
    for (const [from, stores] of before) {
      const kinds = from < 0 ? [(data.inputs[-1 - from] || { type: "" }).type] : stores.map((s) => (kernels[from].boundaries[s] || { type: "" }).type);
      edges.push({ from: from < 0 ? `in${-1 - from}` : from, to: kernel.number, label: kinds.join(", "), back: from >= kernel.number });
      if (from < 0) types.set(-1 - from, true);
    }
    if (!kernel.takes.length && kernel.number && data.parts) edges.push({ from: kernel.number - 1, to: kernel.number, label: "then" });
  }
  for (const index of types.keys()) {
    const port = data.inputs[index] || { name: `input ${index}`, type: "" };
    groups.push({ id: `in${index}`, port: { ...port, input: true, index }, label: short(port.name, 34), sub: port.type });
  }
  data.outputs.forEach((port, index) => {
    if (!port.source) return;
    groups.push({ id: `out${index}`, port: { ...port, index }, label: short(port.name, 34), sub: port.type });
    edges.push({ from: port.source.kernel, to: `out${index}`, label: port.type });
  });
  return { groups, edges };
}

function toned(name) {
  const of = colourings[name];
  return [of.tones(), (group, item) => (group.port ? "paper" : item ? "card" : of.tone(group.kernel))];
}

function drawGraph(section) {
  if (!kernels.length) return section.append(el("div", { class: "card empty" }, "The model has no kernels: its outputs are constants or inputs."));
  const host = section.appendChild(el("div", { class: "card" }));
  const { groups, edges } = graphOf();
  const first = profile ? "time" : "kind";
  const [tones, tone] = toned(first);
  groups.forEach((group) => {
    group.tone = tone(group, null);
    (group.items || []).forEach((item) => { item.tone = tone(group, item); });
  });
  const pick = profile ? el("select", { "aria-label": "Colours" }, Object.entries(colourings).map(([key, c]) => el("option", { value: key, selected: key === first }, `Colours ${c.title}`))) : "";
  view.graph = new GraphView(host, groups, edges, {
    tones, controls: pick, label: "Kernels and the nodes of the model in them",
    chosen: (group, item) => (group.port ? drawPort(group.port) : item ? chooseNode(item.id) : choose(group.kernel.number)),
  });
  if (pick) pick.addEventListener("input", () => view.graph.recolour(...toned(pick.value)));
  host.append(el("p", { class: "note", style: "margin: 6px 0 0" }, "Each box is a kernel: click for its reasons and source, double-click to draw it around the model's nodes in it. Arrows are values that go through memory; dashed ones come from the step before, in a loop."));
  return undefined;
}

// ---------------------------------------------------------------- kernels

function limitsLine() {
  const { flops: peak, bandwidth } = profile.peaks;
  const xs = profile.kernels.map((k) => k.intensity).filter((x) => x > 0);
  const ridge = peak / bandwidth;
  const from = Math.min(ridge / 100, ...xs) / 1.5;
  const to = Math.max(ridge * 10, ...xs) * 1.5;
  return [[from, from * bandwidth], [ridge, peak], [to, peak]];
}

function drawRoofline(host) {
  profile.kernels.forEach((k) => { k.intensity = (k.flops + k.pointwise) / Math.max(1, k.reads + k.writes); });
  const some = profile.kernels.filter((k) => k.intensity > 0);
  const without = profile.kernels.length - some.length;
  host.append(el("h2", {}, "Against the machine's limits"));
  if (!profile.peaks.flops || !profile.peaks.bandwidth || !some.length) return host.append(el("div", { class: "empty" }, some.length ? "The machine's peaks are not known." : "No kernel does arithmetic."));
  const place = host.appendChild(el("div", { class: "plot" }));
  host.append(el("p", { class: "note" }, `The line is what ${counted(profile.peaks.flops)}FLOP/s of multiply-adds and ${counted(profile.peaks.bandwidth)}B/s from memory allow. Larger dots take more time.${without ? ` ${plural(without, "kernel")} without arithmetic left out.` : ""}`));
  const size = (k) => Math.max(6, Math.min(34, 60 * Math.sqrt(k.best / total)));
  plot(place, () => ({
    animation: false, grid: grid({ left: 74 }), tooltip: tooltip((item) => (item.data.kernel ? [`#${item.data.kernel.number} ${item.data.kernel.kind}`, item.data.kernel.label, `${seconds(item.data.kernel.best)}, ${percent(item.data.kernel.best / total)} of a run`, `${counted(item.value[1])}FLOP/s, ${small(item.value[0])} FLOP for each byte`, `${percent(item.data.kernel.share)} of what ${item.data.kernel.bound} allows`] : [])),
    xAxis: axis("FLOP for each byte", { type: "log", axisLabel: { ...text(), formatter: small } }), yAxis: axis("", { type: "log", axisLabel: { ...text(), formatter: (v) => `${counted(v)}FLOP/s` } }),
    series: [
      { type: "line", data: limitsLine(), symbol: "none", silent: true, lineStyle: { width: 2 }, color: colour("quiet") },
      ...kinds.slice(0, 8).map((kind, k) => ({ name: kind, type: "scatter", color: colour(`plot${k}`), itemStyle: { opacity: 0.75 }, data: some.filter((t) => kindTone(t.kind) === k).map((t) => ({ value: [t.intensity, t.gflops * 1e9], symbolSize: size(t), kernel: t })) })),
    ],
  }), (item) => item.data.kernel && choose(item.data.kernel.number));
  host.append(el("div", { class: "legend" }, kinds.slice(0, 8).map((kind, k) => el("span", {}, el("i", { style: `background: var(--plot${k})` }), k === 7 && kinds.length > 8 ? "others" : kind))));
  return undefined;
}

function drawTimes(host) {
  host.append(el("h2", {}, "Time of each kernel, in the order of a run"));
  const place = host.appendChild(el("div", { class: "plot" }));
  host.append(el("p", { class: "note" }, "The bar is the best run, the mark above it the median. Ctrl and the wheel zoom."));
  plot(place, () => ({
    animation: false, grid: grid(), dataZoom: zooming(), tooltip: tooltip((item) => {
      const time = profile.kernels[item.dataIndex];
      return [`#${time.number} ${time.kind}`, time.label, `best ${seconds(time.best)}, median ${seconds(time.median)}`, `${percent(time.best / total)} of a run`];
    }),
    xAxis: axis("kernel", { type: "category", data: profile.kernels.map((k) => k.number) }), yAxis: axis("", { type: "value", axisLabel: { ...text(), formatter: seconds } }),
    series: [
      { type: "bar", data: profile.kernels.map((k) => ({ value: k.best, itemStyle: { color: colour(`plot${kindTone(k.kind)}`) } })), barCategoryGap: "20%" },
      { type: "scatter", data: profile.kernels.map((k) => k.median), symbol: "rect", symbolSize: [7, 2], color: colour("ink") },
    ],
  }), (item) => choose(profile.kernels[item.dataIndex].number));
}

function drawRuns(host) {
  const sums = profile.times.map((run) => run.reduce((a, b) => a + b, 0) / 1e9);
  host.append(el("h2", {}, `${plural(sums.length, "run")}, one after the other`));
  const place = host.appendChild(el("div", { class: "plot" }));
  plot(place, () => ({
    animation: false, grid: grid(), tooltip: tooltip((item) => [`run ${item.dataIndex + 1}`, seconds(item.value)]),
    xAxis: axis("run", { type: "category", data: sums.map((_, k) => k + 1) }), yAxis: axis("", { type: "value", min: 0, axisLabel: { ...text(), formatter: seconds } }),
    series: [{ type: "line", data: sums, symbolSize: 5, color: colour("plot0"), markLine: { silent: true, symbol: "none", label: { ...text(), formatter: "median", position: "insideEndTop" }, lineStyle: { color: colour("quiet"), type: "dashed" }, data: [{ yAxis: profile.median }] } }],
  }));
}

function drawKinds(host) {
  host.append(el("h2", {}, "By kind"), listing(["kind", "calls", "time", "of a run", "speed", "of peak", "of memory"], Object.values(profile.kinds).map((k) => [k.kind, k.label, seconds(k.best), percent(k.best / total), `${counted(k.gflops * 1e9)}FLOP/s`, percent(k.compute), percent(k.memory)]), [1, 2, 3, 4, 5, 6]));
}

function kernelTable(section) {
  const host = section.appendChild(el("div", { class: "card" }));
  const rows = kernels.map((k) => {
    const time = times.get(k.number);
    return { ...k, key: k.number, nodes: label(k), best: time ? time.best : null, share: time ? time.share : null, part: time ? time.best / total : null, compute: time ? time.compute : null, memory: time ? time.memory : null, bound: time ? time.bound : "" };
  });
  const timed = profile ? [
    { title: "Time", field: "best", right: true, show: seconds, width: 86 }, { title: "Of run", field: "part", right: true, show: percent, width: 78 },
    { title: "Of peak", field: "compute", right: true, show: percent, width: 82 }, { title: "Of memory", field: "memory", right: true, show: percent, width: 100 }, { title: "Bound", field: "bound", width: 86 },
  ] : [];
  view.kernelTable = table(host, [
    { title: "#", field: "key", numeric: true, width: 56 }, { title: "Function", field: "function", width: 86 }, { title: "Kind", field: "kind", grow: 1, least: 90 }, { title: "Nodes", field: "nodes", grow: 3, least: 120 }, ...timed,
    { title: "Reads", field: "reads", right: true, show: bytes, width: 94 }, { title: "Writes", field: "writes", right: true, show: bytes, width: 94 }, { title: "FLOP", field: "flops", right: true, show: (v) => (v ? counted(v) : ""), width: 84 },
  ], rows, { chosen: (row) => choose(row.key), search: (row) => `#${row.key} ${row.function} ${row.kind} ${row.nodes} ${row.bound} ${row.origins.map((o) => `n${o.number} ${o.name} ${o.line}`).join(" ")}`, sort: profile ? ["best", "desc"] : null, empty: "No kernels" });
}

function drawKernels(section) {
  if (profile && profile.kernels.length) {
    const pair = section.appendChild(el("div", { class: "pair" }));
    drawTimes(pair.appendChild(el("div", { class: "card" })));
    drawRoofline(pair.appendChild(el("div", { class: "card" })));
    const second = section.appendChild(el("div", { class: "pair" }));
    if (profile.times && profile.times.length > 1) drawRuns(second.appendChild(el("div", { class: "card" })));
    drawKinds(second.appendChild(el("div", { class: "card" })));
  } else {
    section.append(el("div", { class: "card note" }, "Times, and how near each kernel comes to the machine's limits, need a run: ", el("code", {}, "onnxc profile MODEL --html FILE")));
  }
  kernelTable(section);
}

function drawNodes(section) {
  const host = section.appendChild(el("div", { class: "card" }));
  const rows = [...nodes.values()].sort((a, b) => a.number - b.number).map((n) => ({ ...n, where: n.kernels.length ? n.kernels.map((k) => `#${k}`).join(" ") : "none" }));
  const timed = data.node_times ? [{ title: "Time (its part)", field: "seconds", right: true, show: seconds, width: 130 }] : [];
  if (data.node_times) host.append(el("p", { class: "note" }, "The time of a kernel is divided among the nodes in it by their arithmetic and elements: an estimate where there are several."));
  table(host, [
    { title: "#", field: "key", numeric: true, width: 64 }, { title: "Op", field: "op_type", grow: 1, least: 100 }, { title: "Name", field: "name", grow: 2, least: 110 }, { title: "Kernels", field: "where", width: 110 }, ...timed, { title: "Line of the model", field: "line", grow: 3, least: 120 },
  ], rows, { chosen: (row) => chooseNode(row.key), search: (row) => `n${row.number} ${row.op_type} ${row.name} ${row.line} ${row.where}`, sort: data.node_times ? ["seconds", "desc"] : null, empty: "No nodes" });
}

// ---------------------------------------------------------------- memory

function drawMemory(section) {
  const places = data.memory.places.filter((place) => isNumber(place.offset));
  const host = section.appendChild(el("div", { class: "card" }, el("h2", {}, "The arena: which bytes hold which intermediate, while the kernels run")));
  if (!places.length) {
    const why = data.memory.places.length ? "Sizes are dynamic here, and the arena is laid out anew for each size. A profile knows them: onnxc profile MODEL --dim NAME=SIZE --html FILE" : data.parts ? "The model is several programs, each with an arena of its own." : "There are no intermediates.";
    host.append(el("div", { class: "empty" }, why));
    return;
  }
  const last = kernels.length;
  const place = host.appendChild(el("div", { class: "plot tall" }));
  const live = Array.from({ length: last }, (_, k) => places.reduce((sum, p) => sum + (p.first <= k && k <= p.last ? p.nbytes : 0), 0));
  const most = live.indexOf(Math.max(...live));
  host.append(el("p", { class: "note" }, `At most ${bytes(live[most])} are alive at once, in kernel #${most}; the arena has ${bytes(data.memory.arena)}, and all intermediates together ${bytes(data.memory.buffers_total)}. Click a block for the kernel that writes it. Ctrl and the wheel zoom.`));
  plot(place, () => ({
    animation: false, grid: grid({ left: 76 }), dataZoom: zooming(),
    tooltip: tooltip((item) => (item.data.place ? [item.data.place.type, bytes(item.data.place.nbytes), `at ${item.data.place.offset}`, `from kernel #${item.data.place.first} to #${item.data.place.last}`] : [])),
    xAxis: axis("kernel, in the order of a run", { type: "value", min: 0, max: last, minInterval: 1, splitLine: { show: false } }), yAxis: axis("", { type: "value", min: 0, max: data.memory.arena, interval: 2 ** Math.round(Math.log2(Math.max(data.memory.arena, 8) / 5)), axisLabel: { ...text(), formatter: bytes } }),
    series: [{
      type: "custom", clip: true, encode: { x: [0, 1], y: [2, 3] },
      data: places.map((p) => ({ value: [p.first, Math.min(p.last + 1, last), p.offset, p.offset + p.nbytes], place: p, tone: kernels[p.first] ? kindTone(kernels[p.first].kind) : 6 })),
      renderItem: (params, api) => {
        const [x0, y0] = api.coord([api.value(0), api.value(2)]);
        const [x1, y1] = api.coord([api.value(1), api.value(3)]);
        const tone = kernels[places[params.dataIndex].first] ? kindTone(kernels[places[params.dataIndex].first].kind) : 6;
        return { type: "rect", shape: { x: x0, y: y1, width: Math.max(1, x1 - x0), height: Math.max(1, y0 - y1) }, style: { fill: colour(`plot${tone}`), opacity: 0.7, stroke: colour("card"), lineWidth: 1 } };
      },
    }],
  }), (item) => kernels[item.data.place.first] && choose(item.data.place.first));
  host.append(el("div", { class: "legend" }, "written by: ", kinds.slice(0, 8).map((kind, k) => el("span", {}, el("i", { style: `background: var(--plot${k})` }), kind))));
  const second = section.appendChild(el("div", { class: "card" }, el("h2", {}, "Bytes alive")));
  const lines = second.appendChild(el("div", { class: "plot", style: "height: 210px" }));
  plot(lines, () => ({
    animation: false, grid: grid({ left: 76 }), dataZoom: zooming(), tooltip: { ...tooltip((item) => [`kernel #${item.dataIndex}`, bytes(item.value)]) },
    xAxis: axis("kernel", { type: "category", data: live.map((_, k) => k) }), yAxis: axis("", { type: "value", axisLabel: { ...text(), formatter: bytes } }),
    series: [{ type: "line", step: "middle", areaStyle: { opacity: 0.25 }, symbolSize: 5, showSymbol: live.length < 200, data: live, color: colour("plot0") }],
  }), (item) => choose(item.dataIndex));
}

// ---------------------------------------------------------------- the compile

function textsOf(records) {
  const found = [[]];
  for (const record of records) {
    const before = found[found.length - 1];
    const after = [];
    let at = 0;
    for (const [sign, value] of record.change || []) {
      if (sign === "+") after.push(...value);
      else {
        if (sign === "=") after.push(...before.slice(at, at + value));
        at += value;
      }
    }
    found.push(after);
  }
  return found;
}

// The lines of a difference, with a few of those around each place.
function differenceOf(before, change, around) {
  const rows = [];
  let at = 0;
  let [minus, plus] = [[], []];
  const flush = () => {
    minus.forEach((l) => rows.push(["minus", `- ${l}`]));
    plus.forEach((l) => rows.push(["plus", `+ ${l}`]));
    [minus, plus] = [[], []];
  };
  change.forEach(([sign, value], k) => {
    if (sign === "+") plus.push(...value);
    else if (sign === "-") minus.push(...before.slice(at, at + value));
    else {
      flush();
      const same = before.slice(at, at + value);
      const [head, tail] = [k ? around : 0, k < change.length - 1 ? around : 0];
      if (same.length <= head + tail + 1) same.forEach((l) => rows.push(["", `  ${l}`]));
      else {
        same.slice(0, head).forEach((l) => rows.push(["", `  ${l}`]));
        rows.push(["gap", `  … ${plural(same.length - head - tail, "line")} as before …`]);
        if (tail) same.slice(-tail).forEach((l) => rows.push(["", `  ${l}`]));
      }
    }
    if (sign !== "+") at += value;
  });
  flush();
  return rows;
}

const MOST_ROWS = 4000;

function drawText(host, rows) {
  const pre = el("pre", { class: "diff", tabindex: 0 }, rows.slice(0, MOST_ROWS).map(([kind, l]) => el("div", { class: kind }, short(l, 600))));
  fill(host, pre, rows.length > MOST_ROWS ? el("p", { class: "note" }, `${rows.length - MOST_ROWS} more lines are not drawn. `, copied(rows.map(([, l]) => l).join("\n"))) : "");
}

function drawPass(host, records, texts, index) {
  const record = records[index];
  if (!record.change) return fill(host, el("div", { class: "empty" }, "The graph is too large for its text to be kept."));
  const place = el("div");
  const plain = (lines) => lines.map((l) => ["", l]);
  const ways = [["What changed", () => differenceOf(texts[index], record.change, 3)], ["Before", () => plain(texts[index])], ["After", () => plain(texts[index + 1])]];
  const buttons = ways.map(([title, make], k) => el("button", { type: "button", onclick: () => pick(k) }, title));
  const pick = (k) => {
    buttons.forEach((button, j) => { button.style.fontWeight = j === k ? "700" : ""; });
    const rows = ways[k][1]();
    if (rows.some(([kind]) => kind !== "gap")) drawText(place, rows);
    else fill(place, el("div", { class: "empty" }, k ? "There is no graph before the import." : "This pass found nothing to do here."));
  };
  fill(host, el("h2", {}, `${record.name}: the graph as text`), el("div", { class: "bar" }, buttons), place);
  pick(0);
  return undefined;
}

function drawStages(host) {
  const stages = Object.entries(data.stages);
  host.append(el("h2", {}, "Time of the compile, by stage"));
  if (!stages.length) return host.append(el("div", { class: "empty" }, "Not known of this model."));
  const place = host.appendChild(el("div", { class: "plot", style: `height: ${stages.length * 21 + 60}px` }));
  plot(place, () => ({
    animation: false, grid: grid({ left: 150, right: 70, top: 6 }), tooltip: tooltip((item) => [item.name, seconds(item.value)]),
    xAxis: axis("seconds", { type: "value" }), yAxis: axis("", { type: "category", inverse: true, data: stages.map(([name]) => name), axisLabel: { ...text(), interval: 0 } }),
    series: [{ type: "bar", data: stages.map(([, value]) => value), color: colour("plot0"), label: { show: true, position: "right", color: colour("quiet"), formatter: (item) => seconds(item.value) } }],
  }));
  return undefined;
}

function drawCompile(section) {
  drawStages(section.appendChild(el("div", { class: "card" })));
  const host = section.appendChild(el("div", { class: "card" }, el("h2", {}, "Passes over the graph")));
  if (!data.passes) {
    host.append(el("div", { class: "empty" }, "The graphs before and after each pass are made from the ONNX file, which was not at hand (or has changed): make the report of the file that is compiled, or give to_html the model."));
    return;
  }
  const records = data.passes.records;
  const texts = textsOf(records);
  const below = section.appendChild(el("div", { class: "card" }));
  const rows = records.map((record, k) => {
    const ops = Object.entries(record.ops).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
    const changed = k && record.change ? record.change.reduce((sum, [sign, value]) => sum + (sign === "=" ? 0 : sign === "-" ? value : value.length), 0) : 0;
    const what = k ? ops.slice(0, 7).map(([op, n]) => `${n > 0 ? "+" : "−"}${Math.abs(n)} ${op}`).join(", ") + (ops.length > 7 ? `, … (${ops.length - 7} more)` : "") : "the model's nodes and constants";
    const row = el("tr", {}, el("td", {}, link(record.name, () => pick(k))), el("td", { class: "number" }, k ? seconds(record.seconds) : ""), el("td", { class: "number" }, k ? `${records[k - 1].nodes} → ${record.nodes}` : String(record.nodes)), el("td", {}, what || (changed ? "" : el("span", { class: "note" }, "nothing to do"))), el("td", { class: "number" }, changed ? plural(changed, "line") : ""));
    return row;
  });
  const pick = (k) => {
    rows.forEach((row, j) => row.classList.toggle("chosen", j === k));
    drawPass(below, records, texts, k);
  };
  host.append(el("div", { style: "overflow-x: auto" }, el("table", { class: "small" }, el("thead", {}, el("tr", {}, ["pass", "time", "nodes", "more and fewer", "changed"].map((h, k) => el("th", { class: [1, 2, 4].includes(k) ? "number" : "" }, h)))), el("tbody", {}, rows))));
  pick(records.length > 1 ? 1 : 0);
}

startTheme();
drawTop();
drawNothing();
if (data.kind === "profile") addTab("kernels", "Time and kernels", drawKernels);
addTab("graph", "Graph", drawGraph);
if (data.kind !== "profile") addTab("kernels", profile ? "Time and kernels" : "Kernels", drawKernels);
addTab("nodes", "Nodes of the model", drawNodes);
addTab("memory", "Memory", drawMemory);
addTab("compile", "Compile and passes", drawCompile);
startTabs();
finished();

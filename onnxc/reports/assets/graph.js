"use strict";
// A graph of groups with what they hold: layered layout by d3-dag, drawing by Cytoscape. A group is a box; opened, it
// is drawn around its items. Each open group is laid out by itself, so that opening one moves the others aside only.

const ROOM = { x: 26, y: 34, pad: 14, head: 30 };
const LAID_OUT = 6000; // with more boxes than this, those in one row of the layout are not put in a good order

// groups: [{id, label, sub, tone, search, items: [{id, label, tone, search}], links: [[item, item], ...]}]
// edges: [{from, to, label, back}]
class GraphView {
  constructor(host, groups, edges, options) {
    this.groups = new Map(groups.map((group) => [group.id, group]));
    this.edges = edges;
    this.options = options;
    this.open = new Set();
    this.inner = new Map();
    this.tones = options.tones;
    this.place = el("div", { class: "graph", role: "img", "aria-label": options.label || "The graph" });
    this.count = el("span", { class: "count", "aria-live": "polite" });
    this.bar = this.toolbar();
    this.legend = el("div", { class: "legend" });
    host.append(this.bar, this.place, this.legend);
    this.cy = graphs.cytoscape({
      container: this.place, style: this.style(), minZoom: 0.02, maxZoom: 3, autoungrabify: true, boxSelectionEnabled: false,
      selectionType: "single", hideEdgesOnViewport: groups.length > 1500, textureOnViewport: groups.length > 1500,
    });
    this.cy.on("tap", "node", (event) => this.tapped(event.target));
    this.cy.on("dbltap", "node", (event) => this.toggle(event.target.data("group")));
    theme.listeners.push(() => this.cy.style(this.style()));
    const all = groups.reduce((sum, group) => sum + (group.items || []).length, 0);
    if (all <= (options.openBelow ?? 40)) this.openAll(false);
    this.layout();
    this.start();
    this.drawLegend();
  }

  toolbar() {
    const search = el("input", { type: "search", placeholder: "Search nodes, names, lines, kernels", "aria-label": "Search the graph" });
    search.addEventListener("input", () => this.search(search.value));
    search.addEventListener("keydown", (event) => event.key === "Enter" && this.next());
    const button = (label, title, act) => el("button", { type: "button", title, onclick: act }, label);
    const openable = [...this.groups.values()].some((group) => (group.items || []).length > 1);
    return el("div", { class: "bar" }, search, this.count, this.options.controls,
      openable ? [button("Open all", "Draw every group around its nodes", () => this.openAll(true)), button("Close all", "Draw each group as one box", () => this.closeAll())] : "",
      button("Fit", "The whole graph", () => this.cy.fit(undefined, 20)), button("+", "Nearer", () => this.zoom(1.4)), button("−", "Further away", () => this.zoom(1 / 1.4)));
  }

  drawLegend() {
    fill(this.legend, this.tones.map(([name, label]) => el("span", {}, el("i", { style: `background: var(--${name})` }), label)));
  }

  // Other colours: `tone` gives the one of a group, or of an item.
  recolour(tones, tone) {
    this.tones = tones;
    for (const group of this.groups.values()) {
      group.tone = tone(group, null);
      (group.items || []).forEach((item) => { item.tone = tone(group, item); });
    }
    this.cy.nodes().forEach((node) => node.data("tone", (node.data("item") || node.data("of")).tone));
    this.cy.style(this.style());
    this.drawLegend();
  }

  style() {
    const seen = {};
    const of = (name) => (seen[name] ??= colour(name));
    const ink = of("ink");
    return [
      { selector: "node", style: {
        shape: "round-rectangle", width: "data(width)", height: "data(height)", "background-color": (n) => of(n.data("tone")), "border-width": 1,
        "border-color": of("line"), label: "data(label)", color: ink, "font-size": 12, "text-wrap": "wrap", "text-valign": "center", "text-halign": "center",
        "font-family": "system-ui, Noto Sans, DejaVu Sans, sans-serif", "line-height": 1.25, "min-zoomed-font-size": 5,
      } },
      { selector: "node[?port]", style: { "border-style": "dashed" } },
      { selector: "node[?frame]", style: { "background-opacity": 0.45, "text-valign": "top", "text-margin-y": 20, "border-width": 1.5, "border-color": of("quiet") } },
      { selector: "node[?item]", style: { "font-size": 11, "z-index": 10 } },
      { selector: "edge", style: {
        width: 1.3, "line-color": of("quiet"), "target-arrow-color": of("quiet"), "target-arrow-shape": "triangle", "arrow-scale": 0.8, "curve-style": "straight",
        opacity: 0.75, "z-index": 1,
      } },
      { selector: "edge[weights]", style: { "curve-style": "round-segments", "segment-weights": "data(weights)", "segment-distances": "data(distances)", "edge-distances": "node-position", "segment-radii": 12 } },
      { selector: "edge[?back]", style: { "line-style": "dashed", "curve-style": "unbundled-bezier", "control-point-distances": "data(bow)", "control-point-weights": 0.5 } },
      { selector: "edge[?loop]", style: { "curve-style": "bezier", "control-point-step-size": "data(bow)", "loop-direction": "90deg", "loop-sweep": "-40deg" } },
      { selector: ".dim", style: { opacity: 0.22 } },
      { selector: ".hit", style: { "border-width": 4, "border-color": of("hit") } },
      { selector: "node:selected", style: { "border-width": 3.5, "border-color": of("accent") } },
      { selector: "edge.near", style: { width: 2.6, opacity: 1, "line-color": of("accent"), "target-arrow-color": of("accent"), label: "data(label)", "font-size": 11, color: ink, "text-background-color": of("card"), "text-background-opacity": 0.9, "text-background-padding": 2, "z-index": 20 } },
    ];
  }

  // ------------------------------------------------------------ layout

  // Places of boxes [{id, width, height}] in layers: {id: {x, y}}, the bends of edges, and the whole size.
  layered(boxes, links) {
    const number = new Map(boxes.map((box, k) => [box.id, String(k)]));
    const parents = boxes.map(() => new Set());
    for (const [from, to] of links) if (number.has(from) && number.has(to) && from !== to) parents[number.get(to)].add(number.get(from));
    const dag = graphs.graphStratify()(boxes.map((box, k) => ({ id: String(k), parentIds: [...parents[k]] })));
    const size = (node) => [boxes[node.data.id].width, boxes[node.data.id].height];
    const layout = graphs.sugiyama().layering(graphs.layeringLongestPath()).decross(boxes.length > LAID_OUT ? () => undefined : graphs.decrossing())
      .coord(graphs.coordGreedy()).nodeSize(size).gap([ROOM.x, ROOM.y]);
    const { width, height } = layout(dag);
    const id = (node) => boxes[node.data.id].id;
    const places = new Map([...dag.nodes()].map((node) => [id(node), { x: node.x, y: node.y }]));
    const bends = new Map([...dag.links()].map((link) => [`${id(link.source)} ${id(link.target)}`, link.points.slice(1, -1)]));
    return { places, bends, width, height };
  }

  box(group) {
    const text = Math.max(group.label.length * 7.2, (group.sub || "").length * 6.6);
    const width = Math.min(290, Math.max(90, text + 26));
    const height = group.sub ? 46 : 32;
    if (!this.open.has(group.id)) return { id: group.id, width, height };
    if (!this.inner.has(group.id)) {
      const items = group.items.map((item) => ({ id: item.id, width: Math.max(60, item.label.length * 6.7 + 18), height: 26 }));
      this.inner.set(group.id, { items, ...this.layered(items, group.links || []) });
    }
    const inner = this.inner.get(group.id);
    return { id: group.id, width: Math.max(inner.width + 2 * ROOM.pad, Math.min(width, 240)), height: inner.height + ROOM.pad + ROOM.head, inner };
  }

  layout() {
    const boxes = [...this.groups.values()].map((group) => this.box(group));
    const links = this.edges.filter((edge) => !edge.back).map((edge) => [edge.from, edge.to]);
    const { places, bends } = this.layered(boxes, links);
    const elements = [];
    for (const box of boxes) {
      const group = this.groups.get(box.id);
      const at = places.get(box.id);
      const label = box.inner || !group.sub ? group.label : `${group.label}\n${short(group.sub, 42)}`;
      elements.push({ data: { id: `g${box.id}`, group: box.id, of: group, label, tone: group.tone, width: box.width, height: box.height, frame: Boolean(box.inner), port: group.port }, position: { ...at } });
      if (box.inner) this.openedInto(elements, group, box, at);
    }
    const sizes = new Map(boxes.map((box) => [box.id, box]));
    for (const edge of this.edges) elements.push(this.drawn(edge, places, bends, sizes));
    const chosen = this.cy.nodes(":selected").map((node) => node.id());
    this.cy.batch(() => {
      this.cy.elements().remove();
      this.cy.add(elements);
      chosen.forEach((id) => this.cy.getElementById(id).select());
    });
  }

  openedInto(elements, group, box, at) {
    const left = at.x - box.inner.width / 2;
    const top = at.y - box.height / 2 + ROOM.head;
    const sizes = new Map(box.inner.items.map((item) => [item.id, item]));
    for (const item of group.items) {
      const place = box.inner.places.get(item.id);
      const size = sizes.get(item.id);
      elements.push({ data: { id: `g${group.id} ${item.id}`, group: group.id, of: group, item, label: item.label, tone: item.tone, width: size.width, height: size.height }, position: { x: left + place.x, y: top + place.y } });
    }
    for (const [from, to] of group.links || []) elements.push({ data: { source: `g${group.id} ${from}`, target: `g${group.id} ${to}`, label: "" } });
  }

  drawn(edge, places, bends, sizes) {
    const data = { source: `g${edge.from}`, target: `g${edge.to}`, label: edge.label || "", back: edge.back, loop: edge.from === edge.to };
    if (edge.back) {
      const ends = [sizes.get(edge.from), sizes.get(edge.to)];
      data.bow = 60 + Math.max(...ends.flatMap((box) => [box.width, data.loop ? box.height : 0]));
    }
    const points = bends.get(`${edge.from} ${edge.to}`) || [];
    const a = places.get(edge.from);
    const b = places.get(edge.to);
    const length = Math.hypot(b.x - a.x, b.y - a.y);
    if (points.length && length && !edge.back) {
      const [ux, uy] = [(b.x - a.x) / length, (b.y - a.y) / length];
      data.weights = points.map(([x, y]) => ((x - a.x) * ux + (y - a.y) * uy) / length);
      data.distances = points.map(([x, y]) => (x - a.x) * -uy + (y - a.y) * ux);
    }
    return { data };
  }

  // ------------------------------------------------------------ looking around

  start() {
    this.cy.fit(undefined, 20);
    if (this.cy.zoom() > 1.1) this.cy.zoom({ level: 1.1, renderedPosition: { x: this.cy.width() / 2, y: this.cy.height() / 2 } });
    if (this.cy.zoom() >= 0.45) return;
    const all = this.cy.elements().boundingBox();
    this.cy.zoom(Math.max(0.5, Math.min(0.9, (this.cy.width() - 40) / Math.min(all.w, 1400))));
    const first = this.cy.nodes().min((node) => node.position("y")).ele;
    if (first) this.cy.pan({ x: this.cy.width() / 2 - first.position("x") * this.cy.zoom(), y: 30 - (first.position("y") - first.height() / 2) * this.cy.zoom() });
  }

  zoom(by) {
    this.cy.zoom({ level: this.cy.zoom() * by, renderedPosition: { x: this.cy.width() / 2, y: this.cy.height() / 2 } });
  }

  // Changes what is open, and keeps the group that was clicked where it is on the screen.
  change(id, act) {
    const before = id === undefined ? null : { ...this.cy.getElementById(`g${id}`).renderedPosition() };
    act();
    this.layout();
    this.mark();
    if (!before) return;
    const now = this.cy.getElementById(`g${id}`).renderedPosition();
    this.cy.panBy({ x: before.x - now.x, y: before.y - now.y });
  }

  toggle(id) {
    const group = this.groups.get(id);
    if (!(group.items || []).length) return;
    this.change(id, () => (this.open.has(id) ? this.open.delete(id) : this.open.add(id)));
  }

  openAll(draw) {
    for (const group of this.groups.values()) if ((group.items || []).length) this.open.add(group.id);
    if (draw) this.change(undefined, () => undefined);
  }

  closeAll() {
    this.change(undefined, () => this.open.clear());
  }

  tapped(node) {
    this.near(node.data("group"));
    this.options.chosen(node.data("of"), node.data("item") || null);
  }

  near(id) {
    this.cy.edges().removeClass("near");
    this.cy.getElementById(`g${id}`).connectedEdges().addClass("near");
  }

  select(id, move) {
    const node = this.cy.getElementById(`g${id}`);
    this.cy.nodes(":selected").unselect();
    if (!node.length) return;
    node.select();
    this.near(id);
    if (!move) return;
    this.cy.resize(); // it may have been shown a moment ago
    if (this.cy.zoom() < 0.5) this.cy.zoom(0.8);
    this.cy.center(node);
  }

  // ------------------------------------------------------------ searching

  search(value) {
    this.words = value.toLowerCase().split(/\s+/).filter(Boolean);
    this.hits = [];
    if (this.words.length) {
      const has = (thing) => this.words.every((word) => `${thing.label} ${thing.search || ""}`.toLowerCase().includes(word));
      for (const group of this.groups.values()) if (has(group) || (group.items || []).some(has)) this.hits.push(group.id);
    }
    this.at = -1;
    this.mark();
    if (this.hits.length) this.next();
    else this.count.textContent = this.words.length ? "none" : "";
  }

  mark() {
    if (!this.words) return;
    const hits = new Set(this.hits);
    this.cy.batch(() => {
      this.cy.elements().removeClass("dim hit");
      if (!this.words.length) return;
      this.cy.nodes().forEach((node) => {
        if (!hits.has(node.data("group"))) node.addClass("dim");
        else if (!node.data("item")) node.addClass("hit");
      });
      this.cy.edges().addClass("dim");
    });
  }

  next() {
    if (!this.hits || !this.hits.length) return;
    this.at = (this.at + 1) % this.hits.length;
    this.count.textContent = `${this.at + 1} of ${this.hits.length}`;
    this.select(this.hits[this.at], true);
  }
}

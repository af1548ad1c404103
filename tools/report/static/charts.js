// charts by Plotly, in the colours of the page
const colours = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999933"];

function theme() {
  const style = getComputedStyle(document.documentElement);
  const [ink, paper, line] = ["--ink", "--paper", "--line"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, zerolinecolor: line, automargin: true, exponentformat: "none", separatethousands: true };
  return { axis, layout: { font: { color: ink, size: 13 }, paper_bgcolor: paper, plot_bgcolor: paper, colorway: colours,
    margin: { t: 30, r: 20 }, hoverlabel: { align: "left", namelength: -1 } } };
}

function chart(description, traces, layout = {}, clicked = null) {
  const { axis, layout: usual } = theme();
  const place = make("div", { class: "chart", role: "group", "aria-label": description });
  const whole = { ...usual, ...layout };
  if (layout.height) place.style.minHeight = `${layout.height}px`;
  for (const name of ["xaxis", "yaxis"]) whole[name] = { ...axis, ...(layout[name] || {}) };
  // what is not yet in the page has no width
  requestAnimationFrame(() => {
    if (!place.isConnected) return;
    Plotly.newPlot(place, traces, whole, { responsive: true, displaylogo: false, toImageButtonOptions: { format: "svg" } });
    if (clicked) place.on("plotly_click", (event) => clicked(event.points[0]));
  });
  return place;
}

// a logarithmic axis whose ticks are whole numbers, three a decade if there are few decades
function logAxis(values, title) {
  const sizes = values.filter((value) => value > 0).map(Math.log10);
  const low = Math.floor(sizes.reduce((one, other) => Math.min(one, other), Infinity));
  const high = Math.ceil(sizes.reduce((one, other) => Math.max(one, other), -Infinity));
  const steps = high - low > 3 ? [1] : [1, 2, 5];
  const between = (tick) => sizes.some((size) => size <= Math.log10(tick)) && sizes.some((size) => size >= Math.log10(tick));
  const ticks = sizes.length ? Array.from({ length: high - low + 3 }, (_, place) => low - 1 + place)
    .flatMap((power) => steps.map((step) => step * 10 ** power)) : [];
  return { type: "log", title: { text: title }, ...(ticks.filter(between).length > 1 ? { tickvals: ticks, ticktext: ticks.map(number) } : {}) };
}

// paths with values, as the flat lists that treemaps and flame graphs take
function hierarchy(paths) {
  const root = "all";
  const found = new Map([[root, { label: root, parent: "", value: 0 }]]);
  for (const [path, value] of paths) {
    let id = root;
    found.get(id).value += value;
    for (const part of path) {
      const parent = id;
      id = `${id}\u0000${part}`;
      if (!found.has(id)) found.set(id, { label: part, parent, value: 0 });
      found.get(id).value += value;
    }
  }
  const ids = [...found.keys()];
  return {
    ids,
    labels: ids.map((id) => escaped(shortened(found.get(id).label))),
    parents: ids.map((id) => found.get(id).parent),
    values: ids.map((id) => found.get(id).value),
    text: ids.map((id) => duration(found.get(id).value)),
  };
}

const LARGE_GROUP = 0.5;

// a colour for each group of the tree; groups with most of the time have their parts coloured instead, and are grey
function groupColours({ ids, parents, values }) {
  const parts = new Map(ids.map((id) => [id, []]));
  for (let place = 1; place < ids.length; place += 1) parts.get(parents[place]).push(place);
  const found = ids.map(() => theme().axis.gridcolor);
  let used = 0;
  const paint = (place, colour) => {
    found[place] = colour;
    for (const part of parts.get(ids[place])) paint(part, colour);
  };
  const divide = (place) => {
    for (const part of parts.get(ids[place]).sort((one, other) => values[other] - values[one])) {
      const isLarge = values[part] > LARGE_GROUP * values[0] && parts.get(ids[part]).length > 0;
      if (isLarge) divide(part); else paint(part, colours[used++ % colours.length]);
    }
  };
  divide(0);
  return found;
}

function tree(kind, description, paths) {
  const found = hierarchy(paths);
  const extra = kind === "icicle" ? { tiling: { orientation: "v" } } : {};
  const marker = { colors: groupColours(found), ...(kind === "treemap" ? { depthfade: true } : {}) };
  return chart(description, [{ type: kind, branchvalues: "total", textinfo: "label+text+percent root",
    hovertemplate: "%{label}<br>%{text}<br>%{percentRoot:.1%}<extra></extra>", maxdepth: kind === "icicle" ? 12 : 3,
    marker, ...extra, ...found }], { margin: { t: 10, l: 10, r: 10, b: 10 }, height: 520, uniformtext: { minsize: 9, mode: "hide" } });
}

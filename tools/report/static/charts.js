// charts by Plotly, in the colours of the page
const colours = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999933"];

function theme() {
  const style = getComputedStyle(document.documentElement);
  const [ink, paper, line] = ["--ink", "--paper", "--line"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, zerolinecolor: line, automargin: true };
  return { axis, layout: { font: { color: ink, size: 13 }, paper_bgcolor: paper, plot_bgcolor: paper, colorway: colours,
    margin: { t: 30, r: 20 }, hoverlabel: { align: "left", namelength: -1 } } };
}

function chart(description, traces, layout = {}, clicked = null) {
  const { axis, layout: usual } = theme();
  const place = make("div", { class: "chart", role: "group", "aria-label": description });
  const whole = { ...usual, ...layout };
  for (const name of ["xaxis", "yaxis"]) whole[name] = { ...axis, ...(layout[name] || {}) };
  // what is not yet in the page has no width
  requestAnimationFrame(() => {
    if (!place.isConnected) return;
    Plotly.newPlot(place, traces, whole, { responsive: true, displaylogo: false, toImageButtonOptions: { format: "svg" } });
    if (clicked) place.on("plotly_click", (event) => clicked(event.points[0]));
  });
  return place;
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

function tree(kind, description, paths) {
  const extra = kind === "icicle" ? { tiling: { orientation: "v" } } : {};
  return chart(description, [{ type: kind, branchvalues: "total", textinfo: "label+text+percent root",
    hovertemplate: "%{label}<br>%{text}<br>%{percentRoot:.1%}<extra></extra>", maxdepth: kind === "icicle" ? 12 : 3,
    ...extra, ...hierarchy(paths) }], { margin: { t: 10, l: 10, r: 10, b: 10 }, height: 520, uniformtext: { minsize: 9, mode: "hide" } });
}

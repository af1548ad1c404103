// which views there are, and which one is shown
const views = {
  overview: ["Overview", overview, true],
  cases: ["Cases", cases, rowCount > 0],
  candidates: ["Candidates", candidatesView, data.judgements.length > 0],
  modes: ["Modes", modeView, modes.length > 1],
  runs: ["Runs", runView, several],
  shapes: ["Shapes", shapes, okRows.length > 0],
  roofline: ["Roofline", roofline, okRows.some((row) => cell("flops", row) && cell("bytes_moved", row))],
  corpus: ["Corpus", corpusView, Boolean(data.corpus)],
  launches: ["Launches", launches, data.traces.length > 0 || okRows.length > 0],
  longtail: ["Long tail", longtail, data.traces.some((trace) => trace.longtail.length)],
  timeline: ["Timeline", timeline, data.traces.length > 0],
  failures: ["Failures", failures, allRows.some((row) => cell("status", row) !== "ok")],
  environment: ["Environment", environment, data.runs.length > 0],
  columns: ["Columns", columnsView, rowCount > 0],
};

function show(moved) {
  const { path } = address();
  const name = path[0] === "case" ? "case" : path[0] in views && views[path[0]][2] ? path[0] : "overview";
  for (const link of document.querySelectorAll("#views a")) {
    if (link.getAttribute("href") === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const old of main.querySelectorAll(".chart")) Plotly.purge(old);
  main.replaceChildren(...(name === "case" ? caseView(path[1] || "") : views[name][1]()));
  if (moved) main.focus();
}

function setTheme(isDark) {
  document.documentElement.classList.toggle("dark", isDark);
  document.getElementById("theme").textContent = isDark ? "Light" : "Dark";
}

for (const [name, [title, , isThere]] of Object.entries(views)) {
  if (isThere) document.getElementById("views").append(make("li", {}, make("a", { href: `#/${name}` }, title)));
}
const preferred = matchMedia("(prefers-color-scheme: dark)");
setTheme(preferred.matches);
preferred.addEventListener("change", (event) => { setTheme(event.matches); show(false); });
document.getElementById("theme").addEventListener("click", () => {
  setTheme(!document.documentElement.classList.contains("dark"));
  show(false);
});
addEventListener("hashchange", () => { if (location.hash !== "#main") show(true); });
show(false);

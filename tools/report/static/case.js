function shownCell(name, row) {
  const value = cell(name, row);
  if (name === "speed_up") return speedUpText(row);
  return about[name].unit === "1" && value !== null ? percent(value, 1) : value;
}

// the page of one case: all that is known of it
function caseView(key) {
  const rows = allRows.filter((row) => String(cell("key", row) || row) === key);
  if (!rows.length) return [heading("No such case"), make("p", {}, make("a", { href: "#/cases" }, "All cases"))];
  const first = rows[0];
  const parts = [heading(cell("op", first)), make("p", {}, make("code", {}, cell("shapes", first) || "no arguments"))];
  const shown = ["run", "mode", "variant", "marked_status", "count", "captured_us", "median_us", "p10_us", "p90_us",
    "speed_up", "first_ms", "max_abs", "gflop_per_s", "gb_per_s", "of_limit", "bound", "error"].filter((name) => data.rows[name]
    && rows.some((row) => cell(name, row) !== null && cell(name, row) !== ""));
  parts.push(plainTable(shown.map(titleOf), rows.map((row) => shown.map((name) => shownCell(name, row))), "Rows of this case"));
  const timed = rows.filter((row) => data.times[row]);
  if (timed.length) {
    parts.push(make("h2", {}, "Times of single runs"), chart("Distribution of times by row", timed.map((row) => ({ type: "box",
      boxpoints: "all", jitter: 0.5, pointpos: 0, name: escaped([cell("run", row), cell("mode", row), cell("variant", row)].filter((word) => word).join(" ")),
      y: data.times[row] })), { yaxis: { title: { text: "us" }, rangemode: "tozero" }, showlegend: false }));
  }
  parts.push(...historyOf(rows));
  for (const trace of data.traces.filter((item) => Object.hasOwn(item.cases, key))) {
    const known = trace.cases[key];
    parts.push(make("h2", {}, `In ${trace.name}`), plainTable(["argument", "known facts"], known.arguments, "Arguments"),
      plainTable(["called from", "calls"], known.places, "Places"));
    if (known.more_places) parts.push(make("p", {}, `and from ${number(known.more_places)} more places`));
  }
  parts.push(make("h2", {}, "Run it again"),
    make("p", { class: "hint" }, "The command replays all cases of the operator, this one among them."), make("pre", { tabindex: "0" }, [...new Set(rows.map((row) => data.commands[row]))].join("\n")));
  return parts;
}

// how a case fared from run to run, by the time at which they began
function historyOf(rows) {
  const began = Object.fromEntries(data.runs.map((run) => [run.name, Object.fromEntries(run.facts).time]));
  const ways = [...new Set(rows.map(wayOf))];
  const series = ways.map((way) => [way, rows.filter((row) => wayOf(row) === way && cell("median_us", row) !== null
    && began[cell("run", row)]).sort((one, other) => began[cell("run", one)].localeCompare(began[cell("run", other)]))])
    .filter(([, own]) => new Set(own.map((row) => began[cell("run", row)])).size > 1);
  if (!series.length) return [];
  const lines = series.map(([way, own]) => ({ type: "scatter", mode: "lines+markers", name: escaped(way),
    x: own.map((row) => began[cell("run", row)]), y: own.map((row) => cell("median_us", row)),
    text: own.map((row) => escaped(cell("run", row))),
    error_y: { type: "data", symmetric: false, array: own.map((row) => (cell("p90_us", row) ?? cell("median_us", row)) - cell("median_us", row)),
      arrayminus: own.map((row) => cell("median_us", row) - (cell("p10_us", row) ?? cell("median_us", row))) } }));
  return [make("h2", {}, "History"), make("p", { class: "hint" }, "Medians of each run, with the tenth to the ninetieth percentile."),
    chart("History of the case", lines, { xaxis: { type: "date" }, yaxis: { title: { text: "us" }, rangemode: "tozero" } })];
}

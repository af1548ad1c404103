// the views, by name; each gives the elements of its page
const several = data.runs.length > 1;

function total(rows, name = "total_us") {
  return rows.reduce((sum, row) => sum + (cell(name, row) || 0), 0);
}

function grouped(rows, name) {
  const groups = new Map();
  for (const row of rows) {
    const key = cell(name, row) || "(none)";
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  return [...groups.entries()].sort((one, other) => total(other[1]) - total(one[1]));
}

function usualRows() {
  const newest = data.runs.length ? data.runs[data.runs.length - 1].name : "";
  return okRows.filter((row) => cell("run", row) === newest && cell("mode", row) === (modes[0] || "") && !cell("again", row));
}

function overview() {
  const statuses = [...new Set(data.rows.status || [])];
  const marks = [...new Set((data.rows.doubts || []).filter((words) => words).flatMap((words) => words.split(", ")))];
  const counted = (rows, name, words) => words.map((word) => [rows.filter((row) =>
    (cell(name, row) || "").split(", ").includes(word)).length, word]).filter(([count]) => count).map((parts) => parts.join(" "));
  const runs = data.runs.map((run) => {
    const rows = allRows.filter((row) => cell("run", row) === run.name);
    const doubtful = counted(rows, "doubts", marks);
    const counts = [...counted(rows, "status", statuses), ...(doubtful.length ? [`of these ${doubtful.join(" and ")}`] : [])];
    const facts = Object.fromEntries(run.facts);
    return [run.name, facts.trace, facts["environment, machine"], facts.device, facts.torch, rows.length, counts.join(", "),
      duration(total(rows.filter((row) => cell("mode", row) === modes[0] && !cell("again", row))) || null)];
  });
  const parts = [heading(data.title)];
  if (runs.length) {
    parts.push(make("ul", { class: "gates" }, ...answers().map(([style, address, text]) =>
      make("li", {}, make("a", { href: address, class: style }, text)))));
    parts.push(plainTable(["run", "trace", "machine", "device", "torch", "rows", "status", `all calls, ${modes[0]}`], runs, "Runs"));
    parts.push(...timeViews());
  }
  for (const trace of data.traces) if (trace.lines.some((line) => line[3] > 0)) parts.push(...stackView(trace));
  return parts;
}

// what to know first: broken gates, rows that are not right, verdicts, and how much was replayed; each with style and page
function answers() {
  const found = [];
  for (const { name, gates, rows } of data.comparisons) {
    for (const line of gates) {
      found.push([line.includes(": failed") ? "status-bad" : line.includes(": not decided") ? "status-doubtful" : "status-ok", "#/runs", `${name}: ${line}`]);
    }
    for (const [verdict, count] of countsOf(rows.map((row) => row[0]))) found.push([verdictClass(verdict), "#/runs", `${name}: ${count} ${verdict}`]);
  }
  for (const [verdict, count] of countsOf(allRows.map((row) => cell("verdict", row)))) {
    found.push([verdictClass(verdict), "#/candidates", `candidates: ${count} ${verdict}`]);
  }
  for (const [status, count] of countsOf(allRows.map((row) => cell("status", row)))) {
    if (status !== "ok") found.push([statusClass(status), "#/failures", `${count} ${count === 1 ? "row" : "rows"} ${status}`]);
  }
  const replayed = total(capturedRows(), "share");
  const whole = total(capturedRows(), "captured_us") ? "captured time" : "estimated work";
  if (replayed && replayed < 0.995) found.push(["status-doubtful", "#/cases", `only ${percent(replayed, 1)} of the ${whole} was replayed`]);
  const styles = ["status-bad", "status-doubtful", "status-ok"];
  return found.sort(([one], [other]) => styles.indexOf(one) - styles.indexOf(other));
}

function countsOf(words) {
  const counts = new Map();
  for (const word of words.filter((text) => text)) counts.set(word, (counts.get(word) || 0) + 1);
  return counts;
}

// where the calls of a row were made, and the share of its calls there
function sitesOf(row) {
  const { names, lists, of_row } = data.sites;
  return lists[of_row[row]].map(([module, phase, line, share]) => ({ module: names[module], phase: names[phase], line: names[line], share }));
}

const withTrace = (row, parts) => (cell("trace", row) ? [cell("trace", row), ...parts] : parts);
const moduleParts = (row, site) => withTrace(row, site.module ? site.module.split(".") : ["(outside)"]);
const whole = [{ share: 1 }];
const groupings = {
  module: { title: "module, then operator", sites: sitesOf, path: (row, site) => [...moduleParts(row, site), cell("op", row)],
    name: (row, site) => withTrace(row, [site.module || "(outside)"]).join(": ") },
  phase: { title: "phase, then module", sites: sitesOf, path: (row, site) => [site.phase || "(unknown)", ...moduleParts(row, site)],
    name: (row, site) => site.phase || "(unknown)" },
  line: { title: "source line, then operator", sites: sitesOf, path: (row, site) => [...withTrace(row, [site.line || "(unknown)"]), cell("op", row)],
    name: (row, site) => withTrace(row, [site.line || "(unknown)"]).join(": ") },
  family: { title: "family, then operator", sites: () => whole, path: (row) => [cell("family", row), cell("op", row)],
    name: (row) => cell("family", row) },
  op: { title: "operator, then shapes", sites: () => whole, path: (row) => [cell("op", row), cell("shapes", row) || "-"],
    name: (row) => cell("op", row) },
};

// the first row of each case of the newest run and the first mode, whether it was timed or not
function capturedRows() {
  const newest = data.runs.length ? data.runs[data.runs.length - 1].name : "";
  const cases = new Map();
  for (const row of allRows) {
    const id = JSON.stringify([cell("trace", row), cell("case", row), cell("key", row)]);
    if (cell("run", row) === newest && cell("mode", row) === modes[0] && !cases.has(id)) cases.set(id, row);
  }
  return [...cases.values()];
}

// rows added up by the groups that their calls are in, those with most time first
function addedUp(grouping) {
  const groups = new Map();
  const add = (rows, us, name) => {
    for (const row of rows) {
      const own = new Set();
      for (const site of grouping.sites(row)) {
        const key = grouping.name(row, site);
        if (!groups.has(key)) groups.set(key, { cases: 0, calls: 0, captured: 0, replayed: 0 });
        const group = groups.get(key);
        group[name] += site.share * us(row);
        if (name === "captured") {
          group.calls += site.share * (cell("count", row) || 0);
          group.cases += own.has(key) ? 0 : 1;
          own.add(key);
        }
      }
    }
  };
  add(capturedRows(), (row) => (cell("captured_us", row) || 0) * (cell("count", row) || 0), "captured");
  add(usualRows(), (row) => cell("total_us", row) || 0, "replayed");
  return [...groups.entries()].sort(([, one], [, other]) => other.replayed - one.replayed || other.captured - one.captured);
}

const MOST_GROUPS = 50;

function timeViews() {
  const place = make("div");
  const by = address().query.get("by") || (data.sites.names.length > 2 ? "module" : "family");
  const draw = (name) => {
    remember("by", name);
    const grouping = groupings[name];
    const groups = addedUp(grouping);
    const sum = (what) => groups.reduce((before, [, group]) => before + group[what], 0);
    const [captured, replayed] = [sum("captured"), sum("replayed")];
    const shares = [[captured, "captured"], [replayed, "replayed"]].filter(([all]) => all > 0);
    const rows = groups.slice(0, MOST_GROUPS).map(([key, group]) => [key, group.cases, Math.round(group.calls),
      ...shares.flatMap(([all, what]) => [duration(group[what]), `${((100 * group[what]) / all).toFixed(1)}%`])]);
    place.replaceChildren(
      tree("treemap", `Treemap of time by ${grouping.title}`, usualRows().flatMap((row) => grouping.sites(row).map((site) =>
        [grouping.path(row, site), site.share * (cell("total_us", row) || 0)]))),
      plainTable([name, "cases", "calls", ...shares.flatMap(([, what]) => [what, "share"])], rows, `Time by ${name}`));
    if (groups.length > MOST_GROUPS) place.append(make("p", {}, `and ${number(groups.length - MOST_GROUPS)} more`));
  };
  draw(by in groupings ? by : "family");
  return [make("h2", {}, "Where the time goes"),
    make("p", { class: "hint" }, "Each call counts with its case's median time. The picture shows replayed time. Click a tile to go into it."),
    make("div", { class: "controls" }, choice("By", Object.entries(groupings).map(([name, { title }]) => [name, title]), by, draw)), place];
}

function stackView(trace) {
  const lines = [...trace.lines].sort((one, other) => other[3] - one[3]);
  const sum = lines.reduce((before, line) => before + line[3], 0) || 1;
  return [make("h2", {}, `Functions of ${trace.name}`),
    make("p", { class: "hint" }, "Captured time by the Python functions that were running, outermost first. "
      + "Each call counts with the median time of its signature."),
    tree("icicle", `Flame graph of ${trace.name}`, trace.stacks),
    plainTable(["line", "function", "calls", "time", "share"], lines.slice(0, 20).map((line) =>
      [`${line[0]}:${line[1]}`, line[2], line[4], duration(line[3]), `${((100 * line[3]) / sum).toFixed(1)}%`]), "Lines")];
}

const caseColumns = ["op", "run", "mode", "variant", "marked_status", "captured_us", "median_us", "speed_up", "total_us", "share", "count",
  "shapes", "module", "family", "of_limit", "note"];

function cases() {
  const varied = caseColumns.filter((name) => data.rows[name] && (["op", "marked_status", "median_us"].includes(name)
    || new Set(data.rows[name]).size > 1));
  const columns = rowColumns(varied);
  return [heading("Cases"), make("p", { class: "hint" }, "A row is a case under a mode; its operator links to the page of the case."),
    bigTable(columns, allRows, "Cases", { order: [[varied.indexOf("total_us") < 0 ? 0 : varied.indexOf("total_us"), "desc"]] })];
}

function modeView() {
  const reference = modes[0];
  const middle = (values) => (values.length ? values[values.length >> 1] : null);
  const rows = data.modes.map(({ run, mode, statuses, speed_up: found }) => {
    const own = allRows.filter((row) => cell("run", row) === run && cell("mode", row) === mode);
    const won = own.map((row) => cell("break_even", row)).filter((calls) => calls).sort((a, b) => a - b);
    const figures = ["mean", "low", "high", "weighted"].map((name) => (found ? found[name].toFixed(2) : "-"));
    const counts = ["faster", "slower"].map((name) => (found ? found[name] : 0));
    return [...(several ? [run] : []), mode, own.length, statuses.ok || 0, statuses.wrong || 0, ...figures, ...counts, middle(won)];
  });
  const sped = okRows.filter((row) => cell("speed_up", row));
  const boxes = modes.slice(1).map((mode) => [mode, sped.filter((row) => cell("mode", row) === mode)]).map(([mode, own]) => ({
    type: "box", name: escaped(mode), boxpoints: own.length <= 200 ? "all" : "outliers", jitter: 0.4, pointpos: 0,
    y: own.map((row) => cell("speed_up", row)), text: own.map((row) => `${escaped(cell("op", row))}<br>${escaped(shortened(cell("shapes", row) || "", 80))}`) }));
  return [heading("Modes"),
    make("p", { class: "hint" }, `Speed-up: the median under ${reference} divided by that under the mode, as geometric mean over the cases. `
      + "Faster and slower count the cases in which nine of ten paired runs are faster or slower."),
    plainTable([...(several ? ["run"] : []), "mode", "cases", "ok", "wrong", `speed-up over ${reference}`, "p10", "p90", "by calls",
      "faster", "slower", "calls until compiling pays off (median)"], rows, "Modes", true),
    chart(`Speed-up of each mode over ${reference}`, boxes,
      { yaxis: logAxis(sped.map((row) => cell("speed_up", row)), "speed-up"), showlegend: false }),
    make("h2", {}, "Case by case"),
    bigTable(rowColumns(["op", "shapes", "run", "mode", "marked_status", "median_us", "speed_up", "first_ms", "break_even", "max_abs",
      "max_rel", "error"]), allRows.filter((row) => cell("mode", row) !== reference), "Cases under each mode")];
}

function comparisonView(comparison) {
  const columns = comparison.columns.map((name, place) => ({ name, title: name.replace("_", " "), value: (row) => row[place],
    isNumber: ["base_us", "new_us", "ratio", "low", "high"].includes(name) }));
  const held = columns.filter((column) => comparison.rows.some((row) => ![null, ""].includes(column.value(row))));
  return [make("h2", {}, `${comparison.name} compared with ${comparison.base}`),
    make("ul", { class: "gates" }, ...comparison.gates.map((line) => make("li", {}, line))),
    ...comparison.lines.map((line) => make("p", { class: "hint" }, line)),
    bigTable(held, comparison.rows, `Verdicts of ${comparison.name}`, { order: [] })];
}

function runView() {
  const names = data.runs.map((run) => run.name);
  const groups = new Map();
  for (const row of okRows) {
    const id = `${cell("key", row) || cell("op", row) + cell("shapes", row)} ${wayOf(row)}`;
    if (!groups.has(id)) groups.set(id, Object.create(null));
    groups.get(id)[cell("run", row)] = row;
  }
  const joined = [...groups.values()].filter((found) => names[0] in found);
  const base = (found) => found[names[0]];
  const columns = [
    { name: "op", title: "operator", value: (found) => cell("op", base(found)), link: (found) => caseAddress(base(found)) },
    { name: "shapes", title: "shapes", value: (found) => cell("shapes", base(found)) },
    { name: "mode", title: "mode", value: (found) => wayOf(base(found)) },
    ...names.map((name) => ({ name, title: `${name}, us`, isNumber: true, value: (found) => (name in found ? cell("median_us", found[name]) : null) })),
    ...names.slice(1).map((name) => ({ name: `${name} ratio`, title: `${name} over ${names[0]}`, isNumber: true,
      value: (found) => (name in found ? Number((cell("median_us", found[name]) / cell("median_us", base(found))).toPrecision(4)) : null) })),
  ];
  const medians = okRows.map((row) => cell("median_us", row));
  const ends = [medians.reduce((one, other) => Math.min(one, other), Infinity), medians.reduce((one, other) => Math.max(one, other), 0)];
  const equal = { type: "scatter", mode: "lines", name: `as ${escaped(names[0])}`, x: ends, y: ends, hoverinfo: "skip",
    line: { dash: "dot", width: 1, color: theme().layout.font.color } };
  const points = names.slice(1).map((name) => {
    const both = joined.filter((found) => name in found).slice(0, 5000);
    return { type: "scatter", mode: "markers", name: escaped(name), x: both.map((found) => cell("median_us", base(found))),
      y: both.map((found) => cell("median_us", found[name])), text: both.map((found) => escaped(cell("op", base(found)))) };
  });
  return [heading("Runs side by side"), ...data.comparisons.flatMap(comparisonView), make("h2", {}, "Medians"),
    make("p", { class: "hint" }, "Medians and their ratios; the verdicts above say which of them are more than chance."),
    chart("Median times of each run over those of the first", [equal, ...points], { xaxis: logAxis(medians, escaped(`${names[0]}, us`)),
      yaxis: logAxis(medians, escaped(`${names.length > 2 ? "other runs" : names[1]}, us`)) }),
    bigTable(columns, joined, "Cases in each run")];
}

function shapes() {
  const operators = grouped(okRows, "op").map(([name]) => name);
  const sizes = [["bytes", "bytes in and out"], ["flops", "floating-point operations"]].filter(([name]) =>
    name === "bytes" ? data.rows.bytes_in : data.rows.flops);
  const place = make("div");
  const { query } = address();
  const state = { op: query.get("op") || operators[0], size: query.get("size") || (sizes[0] || ["bytes"])[0] };
  const sizeOf = (row) => (state.size === "flops" ? cell("flops", row) : (cell("bytes_in", row) || 0) + (cell("bytes_out", row) || 0));
  const draw = (changes) => {
    Object.assign(state, changes);
    for (const [name, value] of Object.entries(state)) remember(name, value);
    const rows = okRows.filter((row) => cell("op", row) === state.op && sizeOf(row) > 0);
    const seriesOf = (row) => [...(several ? [cell("run", row)] : []), cell("mode", row)].join(" ");
    const series = [...new Set(rows.map(seriesOf))].map((name) => {
      const own = rows.filter((row) => seriesOf(row) === name);
      return { type: "scatter", mode: "markers", name: escaped(name), showlegend: true, x: own.map(sizeOf), y: own.map((row) => cell("median_us", row)),
        customdata: own, text: own.map((row) => escaped(cell("shapes", row))) };
    });
    place.replaceChildren(chart(`Time of ${state.op} over its size`, series, {
      xaxis: logAxis(rows.map(sizeOf), state.size === "flops" ? "FLOP" : "bytes in and out"),
      yaxis: logAxis(rows.map((row) => cell("median_us", row)), "median, us") }, (point) => {
      location.hash = caseAddress(point.customdata).slice(1);
    }), plainTable([...(several ? ["run"] : []), "shapes", "mode", state.size === "flops" ? "FLOP" : "bytes", "median, us"],
      rows.slice(0, 200).map((row) => [...(several ? [cell("run", row)] : []), cell("shapes", row), cell("mode", row), sizeOf(row),
        cell("median_us", row)]), state.op, true));
  };
  draw({});
  return [heading("Shapes against time"), make("div", { class: "controls" },
    choice("Operator", operators.map((name) => [name, name]), state.op, (op) => draw({ op })),
    choice("Size", sizes, state.size, (size) => draw({ size }))), place];
}

function roofline() {
  const run = data.runs.find((item) => item.ceilings);
  const rows = okRows.filter((row) => cell("flops", row) && cell("bytes_moved", row));
  const intensity = (row) => cell("flops", row) / cell("bytes_moved", row);
  const dots = { type: "scatter", mode: "markers", name: "cases", x: rows.map(intensity), customdata: rows,
    y: rows.map((row) => cell("gflop_per_s", row)),
    text: rows.map((row) => `${escaped(cell("op", row))}<br>${escaped(shortened(cell("shapes", row) || "", 80))}`),
    marker: { size: rows.map((row) => 6 + 40 * Math.sqrt(cell("share", row) || 0)), opacity: 0.7 } };
  const lines = [];
  if (run) {
    const [low, high] = [Math.min(0.01, ...rows.map(intensity)), Math.max(1000, ...rows.map(intensity))];
    const top = Math.max(...run.ceilings.rates.map(([, rate]) => rate || 0));
    for (const [name, rate] of run.ceilings.rates) {
      if (rate) lines.push({ type: "scatter", mode: "lines", name: escaped(`${name}: ${number(rate)} GFLOP/s`), x: [low, high], y: [rate, rate] });
    }
    for (const [name, bandwidth] of run.ceilings.bandwidths) {
      lines.push({ type: "scatter", mode: "lines", line: { dash: "dot" }, name: escaped(`${name}: ${number(bandwidth)} GB/s`),
        x: [low, top / bandwidth], y: [low * bandwidth, top] });
    }
  }
  return [heading("Roofline"), make("p", { class: "hint" }, run ? "Operations per second over operations per byte, under the measured peaks of the machine."
    : "These runs have no peaks of the machine: replay with --roofline to draw the cases under them."),
    ...(run ? [chart("Roofline", [...lines, dots], { height: 560, xaxis: logAxis(lines.flatMap((line) => line.x), "flop/byte"),
      yaxis: logAxis([...dots.y, ...lines.flatMap((line) => line.y)], "GFLOP/s") }, (point) => {
      if (point.customdata !== undefined) location.hash = caseAddress(point.customdata).slice(1);
    })] : []),
    bigTable(rowColumns(["op", "shapes", "mode", "run", "flops", "bytes_moved", "gflop_per_s", "gb_per_s", "limit_us", "of_limit", "bound"]),
      rows, "Cases with arithmetic")];
}

function longtail() {
  const parts = [heading("Long-tail functions"), make("p", { class: "hint" },
    "Python functions that break into many small operators, and the most that one kernel in their place can save.")];
  const names = [["function", "function"], ["calls", "calls"], ["operators", "operators"], ["time_us", "time, us"], ["saving_us", "saving, us"]];
  for (const trace of data.traces.filter((item) => item.longtail.length)) {
    const speed = make("p", { class: "hint" }, `Savings are those at a memory bandwidth of ${number(trace.gb_per_s)} GB/s.`);
    parts.push(make("h2", {}, trace.name), speed, bigTable(names.map(([name, title]) => ({ name, title, isNumber: name !== "function",
      value: (item) => item[name] })), trace.longtail, `Long-tail functions of ${trace.name}`, { order: [[4, "desc"]] }));
  }
  return parts;
}

function timeline() {
  const parts = [heading("Timeline")];
  for (const trace of data.traces) {
    const { calls, threads, left_out, critical_us } = trace.timeline;
    const bars = [[0, "other calls", colours[5]], [1, "critical path", colours[1]]].map(([critical, name, colour]) => {
      const own = calls.filter((call) => call[6] === critical);
      return { type: "bar", orientation: "h", name, marker: { color: colour }, base: own.map((call) => call[0] / 1e3),
        x: own.map((call) => call[1] / 1e3), y: own.map((call) => escaped(threads[call[2]])),
        text: own.map((call) => `${escaped(call[3])}<br>${escaped(call[4] || "")} ${call[5]}`), textposition: "none",
        hovertemplate: "%{text}<br>%{x:.3f} ms<extra></extra>" };
    });
    parts.push(make("h2", {}, trace.name), make("p", { class: "hint" },
      `Calls where they ran; the critical path takes ${duration(critical_us)}.${left_out ? ` The ${number(left_out)} shortest calls are left out.` : ""}`),
    chart(`Timeline of ${trace.name}`, bars, { barmode: "overlay", height: 220 + 60 * threads.length,
      xaxis: { title: { text: "ms" }, rangeslider: {} } }));
    const longest = [...calls].sort((one, other) => other[1] - one[1]).slice(0, 25);
    parts.push(plainTable(["operator", "module", "phase", "begins, ms", "takes", "critical"], longest.map((call) =>
      [call[3], call[4], call[5], call[0] / 1e3, duration(call[1]), call[6] ? "yes" : "no"]), "The longest calls"));
  }
  return parts;
}

function failures() {
  const rows = allRows.filter((row) => cell("status", row) !== "ok");
  const reasons = grouped(rows, "error").map(([reason, members]) => [members.every((row) => cell("status", row) === "contended")
    ? "other processes used the cores in all runs" : reason, [...new Set(members.map((row) => cell("status", row)))].join(", "),
    members.length, [...new Set(members.map((row) => cell("op", row)))].slice(0, 5).join(", ")]);
  return [heading("Failures"), plainTable(["reason", "status", "rows", "operators"], reasons, "Reasons"), make("h2", {}, "Rows"),
    bigTable(rowColumns(["op", "shapes", "run", "mode", "status", "error"]), rows, "Rows that are not ok")];
}

function environment() {
  const facts = data.runs.map((run) => new Map(run.facts));
  const names = [...new Set(facts.flatMap((fact) => [...fact.keys()]))];
  const rows = names.map((name) => {
    const values = facts.map((fact) => fact.get(name) ?? "-");
    const differs = new Set(values).size > 1;
    return [name, ...values.map((value) => (differs ? make("strong", {}, value) : value))];
  });
  return [heading("Environment"), several ? make("p", { class: "hint" }, "What differs between the runs is bold.") : "",
    plainTable(["fact", ...data.runs.map((run) => run.name)], rows, "Environment", true)];
}

// a text whose parts in backticks are code
const marked = (text) => make("span", {}, ...text.split("`").map((part, place) => (place % 2 ? make("code", {}, part) : part)));

function columnsView() {
  return [heading("Columns"), plainTable(["column", "unit", "meaning"], data.columns.map((column) =>
    [column.name, column.unit === "1" ? "%" : column.unit || "-", marked(column.meaning)]), "Columns", true)];
}

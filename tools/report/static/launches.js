// launches: what takes hardly longer than it takes to launch it
const shortUs = data.short_us;

// of one call of a row: kernels where a profiler counted them, else operators
function launchesOf(row) {
  for (const name of ["nsys_launches", "ncu_launches", "operators"]) {
    if (cell(name, row) !== null && cell(name, row) !== undefined) return cell(name, row);
  }
  return 1;
}

const launchTime = (row) => (launchesOf(row) > 0 ? cell("median_us", row) / launchesOf(row) : null);
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)}%` : "-");

function launchSums(rows) {
  const sums = { launches: 0, time: 0, short: 0, shortTime: 0 };
  for (const row of rows) {
    const launches = launchesOf(row) * Math.max(cell("count", row) || 0, 1);
    const time = cell("total_us", row) || 0;
    sums.launches += launches;
    sums.time += time;
    if (launches > 0 && launchTime(row) < shortUs) {
      sums.short += launches;
      sums.shortTime += time;
    }
  }
  return sums;
}

const shortTitles = [`share of launches under ${shortUs} us`, `share of time under ${shortUs} us`];

function launches() {
  const parts = [heading("Launches"), make("p", { class: "hint" },
    `Launching an operator or a kernel takes 2 to 10 us. Launches of less than ${shortUs} us consist mostly of this cost, which fusion can remove.`)];
  for (const trace of data.traces) parts.push(...traceLaunches(trace));
  return rowCount ? [...parts, ...replayedLaunches()] : parts;
}

function traceLaunches(trace) {
  const { are_kernels, all, curve } = trace.launches;
  const [, calls, count, time, short, shortTime] = all;
  const what = are_kernels ? "kernels" : "operators";
  const place = make("div");
  const state = address().query.get("by");
  const draw = (by) => { remember("by", by); place.replaceChildren(launchTable(trace, by, what)); };
  const choices = [["module", "module"], ["op", "operator"], ["case", "case"]];
  const chosen = choices.some(([name]) => name === state) ? state : "module";
  draw(chosen);
  return [make("h2", {}, trace.name),
    make("p", {}, `${number(count)} launches of ${what} in ${number(calls)} calls, ${duration(count > 0 ? time / count : null)} each. `
      + `${percent(short, count)} of them take less than ${shortUs} us, and ${percent(shortTime, time)} of the time.`),
    curve.length ? launchCurve(trace) : null,
    make("div", { class: "controls" }, choice("By", choices, chosen, draw)), place].filter((part) => part);
}

function launchCurve(trace) {
  const times = trace.launches.curve.map((point) => point[0]);
  const lines = [["launches", 1], ["time", 2]].map(([name, column]) => ({ type: "scatter", mode: "lines", name: `of ${name}`,
    x: times, y: trace.launches.curve.map((point) => point[column]), hovertemplate: "%{y:.1%} below %{x} us<extra>%{fullData.name}</extra>" }));
  return chart(`Launches of ${trace.name} by their time`, lines, {
    xaxis: { type: "log", title: { text: "time of a launch, us" } }, yaxis: { tickformat: ".0%", range: [0, 1.02], title: { text: "share below" } },
    shapes: [{ type: "line", x0: shortUs, x1: shortUs, yref: "paper", y0: 0, y1: 1, line: { dash: "dot", color: colours[1] } }] });
}

function launchTable(trace, by, what) {
  const share = (place, whole) => (item) => (item[whole] > 0 ? Number(((100 * item[place]) / item[whole]).toPrecision(3)) : null);
  const keys = new Set(data.rows.key || []);
  const first = { name: by, title: by === "module" ? "module" : "operator", meaning: "name of the module, operator or case", value: (item) => item[0],
    link: by === "case" ? (item) => (keys.has(item[7]) ? `#/case/${encodeURIComponent(item[7])}` : "") : null };
  const shapes = { name: "shapes", title: "shapes", meaning: "shapes of the arguments", value: (item) => item[6] };
  const figures = [
    ["calls", "number of calls in the program", (item) => item[1]],
    [what, `number of ${what} that all calls launch`, (item) => item[2]],
    [`${what} per call`, `number of ${what} that one call launches`, (item) => Number((item[2] / item[1]).toPrecision(3))],
    ["us per launch", "mean time of a launch", (item) => (item[2] > 0 ? Number((item[3] / item[2]).toPrecision(4)) : null)],
    ["time, us", "time of all calls", (item) => item[3]],
    [`% of launches under ${shortUs} us`, `share of its launches that take less than ${shortUs} us`, share(4, 2)],
    [`% of time under ${shortUs} us`, `share of its time in launches of less than ${shortUs} us`, share(5, 3)],
  ].map(([title, meaning, value]) => ({ name: title, title, meaning, value, isNumber: true }));
  const columns = [first, ...(by === "case" ? [shapes] : []), ...figures];
  return bigTable(columns, trace.launches[by], `Launches of ${trace.name} by ${by}`,
    { order: [[columns.findIndex((column) => column.name === what), "desc"]] });
}

function replayedLaunches() {
  const groups = data.runs.flatMap((run) => modes.map((mode) => [run.name, mode, okRows.filter((row) =>
    cell("run", row) === run.name && cell("mode", row) === mode)])).filter(([, , rows]) => rows.length);
  const sums = groups.map(([run, mode, rows]) => [run, mode, launchSums(rows)]);
  const added = [
    { name: "launches", title: "launches per call", meaning: "kernels of one call if a profiler counted them, otherwise operators", isNumber: true, value: launchesOf },
    { name: "launches_all", title: "launches in all", meaning: "number of launches of all calls in the program", isNumber: true,
      value: (row) => launchesOf(row) * Math.max(cell("count", row) || 0, 1) },
    { name: "launch_us", title: "us per launch", meaning: "median time of a call, divided by its launches", isNumber: true,
      value: (row) => (launchTime(row) === null ? null : Number(launchTime(row).toPrecision(4))) },
  ];
  const columns = [...rowColumns(["op", "shapes", "run", "mode", "count", "median_us"]), ...added];
  return [make("h2", {}, "Replayed cases"),
    plainTable(["run", "mode", "launches", "each", ...shortTitles], sums.map(([run, mode, sum]) => [run, mode, sum.launches,
      duration(sum.launches > 0 ? sum.time / sum.launches : null), percent(sum.short, sum.launches), percent(sum.shortTime, sum.time)]),
    "Launches of each run"),
    bigTable(columns, okRows, "Launches of each case", { order: [[columns.length - 2, "desc"]] })];
}

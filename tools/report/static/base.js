// what the page shows, and small helpers; texts of a trace are a stranger's and go into text nodes alone
const data = JSON.parse(document.getElementById("data").textContent);
// JSON has no word for inf
for (const name of ["max_abs", "max_rel"])
  if (data.rows[name]) data.rows[name] = data.rows[name].map((value) => (value === "inf" ? Infinity : value));
const main = document.getElementById("main");
const rowCount = data.rows.op ? data.rows.op.length : 0;
const cell = (name, row) => (data.rows[name] ? data.rows[name][row] : null);
const allRows = Array.from({ length: rowCount }, (_, row) => row);
const okRows = allRows.filter((row) => cell("status", row) === "ok" && cell("median_us", row) !== null);
const modes = [...new Set(data.rows.mode || [])];
const about = Object.fromEntries(data.columns.map((column) => [column.name, column]));

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => String(text).replace(/[&<>"']/g, (character) => escapes[character]);
const shortened = (text, most = 60) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function number(value) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 100 ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : String(Number(value.toPrecision(3)));
}

function duration(us) {
  if (us === null || us === undefined) return "-";
  return us >= 1e6 ? `${number(us / 1e6)} s` : us >= 1e3 ? `${number(us / 1e3)} ms` : `${number(us)} us`;
}

function heading(text) {
  const title = make("h1", {}, text);
  document.title = `${text} - ${data.title}`;
  return title;
}

// a table; `hidden` leaves out a caption that repeats the heading above it
function plainTable(names, rows, caption, hidden = false) {
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)));
  const hasNumbers = names.map((_, place) => rows.some((cells) => typeof cells[place] === "number"));
  const body = rows.map((cells) =>
    make("tr", {}, ...cells.map((value, place) =>
      make("td", { class: hasNumbers[place] ? "number" : null },
        value instanceof Node ? value : typeof value === "number" ? number(value) : String(value ?? "-")))));
  const title = caption && !hidden ? make("caption", {}, caption) : null;
  return scrolling(make("table", { class: "plain" }, title, make("thead", {}, head), make("tbody", {}, ...body)), caption || "table");
}

// a table that scrolls sideways, with a line above it while columns are out of sight
function scrolling(table, caption) {
  const hint = make("p", { class: "hint", hidden: "" }, "Scroll the table to the right for more columns.");
  const place = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table);
  // a table has no width before it is in the page, and another after each drawing
  const watcher = new ResizeObserver(() => { hint.hidden = place.scrollWidth <= place.clientWidth; });
  watcher.observe(place);
  watcher.observe(table);
  return make("div", {}, hint, place);
}

function choice(label, options, value, changed) {
  const list = make("select", { onchange: (event) => changed(event.target.value) },
    ...options.map(([key, text]) => make("option", { value: key, selected: key === value ? "" : null }, text)));
  return make("label", {}, `${label} `, list);
}

// of an address that somebody has typed or cut
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// the state of a view stands in its address, so that it can be sent to others
function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").map(decoded), query: new URLSearchParams(query || "") };
}

function remember(name, value) {
  const { path, query } = address();
  if (value) query.set(name, value); else query.delete(name);
  const text = query.toString();
  history.replaceState(null, "", `#/${path.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`);
}

// under which mode, and how else a row was run
const wayOf = (row) => [cell("mode", row), cell("variant", row)].filter((word) => word).join(", ");

const caseAddress = (row) => `#/case/${encodeURIComponent(cell("key", row) || row)}`;

// a speed-up as the terminal shows it
const speedUpText = (row) => (cell("speed_up", row) === null || cell("speed_up", row) === undefined ? "-"
  : `${cell("is_speed_up_doubtful", row) ? "~" : ""}${cell("speed_up", row).toFixed(2)}`);

// tables by DataTables, which draws a page of rows at a time
let tableModule = null;

function loadTables() {
  if (!tableModule) {
    const text = atob(document.getElementById("tables").textContent);
    const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
    tableModule = import(URL.createObjectURL(new Blob([bytes], { type: "text/javascript" })));
  }
  return tableModule;
}

function rendered(column) {
  return (value, use, row) => {
    if (use === "sort" || use === "type") return value === null ? (column.isNumber ? -Infinity : "") : value;
    if (use === "filter") return value === null ? "" : String(value);
    if (value === null || value === undefined) return "-";
    if (column.name === "speed_up") return speedUpText(row);
    if (column.isShare) return percent(value, 1);
    const text = escaped(typeof value === "number" ? number(value) : shortened(String(value), 120));
    const address = column.link ? column.link(row) : "";
    if (address) return `<a href="${escaped(address)}">${text}</a>`;
    if (column.name === "verdict") return `<span class="${verdictClass(value)}">${text}</span>`;
    if (column.name === "status" || column.name === "marked_status") return `<span class="${statusClass(value)}">${text}</span>`;
    return text;
  };
}

// columns: name, title, meaning, values by row; link: gives the address that a cell leads to, empty for none
function bigTable(columns, rows, caption, options = {}) {
  const head = make("tr", {}, ...columns.map((column) => make("th", { scope: "col", title: column.meaning }, column.title)));
  const table = make("table", { class: "display compact", "aria-label": caption }, make("thead", {}, head));
  const query = address().query;
  loadTables().then((module) => {
    if (!table.isConnected) return;
    const DataTable = module.default;
    const view = new DataTable(table, {
      data: rows,
      deferRender: true,
      pageLength: 25,
      lengthMenu: [10, 25, 100, 1000],
      search: { search: query.get("q") || "" },
      searchDelay: 150,
      order: options.order || [],
      columns: columns.map((column) => ({
        data: (row) => column.value(row), render: rendered(column), className: column.isNumber ? "dt-right" : "dt-left",
        type: column.isNumber ? "num" : "string",
      })),
      language: { search: "Search", lengthMenu: "_MENU_ rows a page", emptyTable: "nothing" },
    });
    view.on("search.dt", () => remember("q", view.search()));
  });
  return scrolling(table, caption);
}

const numeric = (name) => (data.rows[name] || []).some((value) => typeof value === "number");

function rowColumns(names) {
  return names.filter((name) => data.rows[name]).map((name) => ({
    name, title: titleOf(name), meaning: about[name].meaning, isNumber: numeric(name), isShare: about[name].unit === "1",
    value: (row) => cell(name, row),
    link: name === "op" ? caseAddress : null,
  }));
}

const statusClass = (status) => (status === "ok" ? "status-ok" : status.startsWith("ok") ? "status-doubtful" : "status-bad");

const verdictClass = (verdict) => (["wrong", "failed", "SLOWER", "FAILED", "CHANGED", "MISSING"].includes(verdict) ? "status-bad"
  : ["slower", "undecided", "UNSURE", "UNTIMED"].includes(verdict) ? "status-doubtful" : "status-ok");

const rates = { gflop_per_s: "GFLOP/s", gb_per_s: "GB/s", bytes_moved: "bytes moved", flops: "FLOP" };

function titleOf(name) {
  if (name === "marked_status") return "status";
  if (name === "speed_up") return "speed-up";
  if (rates[name]) return rates[name];
  const unit = about[name] ? about[name].unit : "";
  const words = name.replace(/_(us|ms|bytes|gb_per_s|mhz)$/, "").replaceAll("_", " ");
  return unit && unit !== "1" ? `${words}, ${unit}` : words;
}

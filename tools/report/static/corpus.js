// several traces together: a table for each way to look at them
const corpusTables = {
  op: "operator", shape: "operator and shapes", dtype: "dtypes", signature: "signature", model: "model", family: "family",
  coverage: "coverage of torch's operators",
};

function corpusView() {
  const place = make("div");
  const draw = (by) => {
    remember("by", by);
    const table = data.corpus.tables[by];
    const columns = table.columns.map((column, position) => ({
      name: column.name, title: column.name.replaceAll("_", " "), meaning: column.meaning, isNumber: column.is_number,
      value: (row) => row[position],
    }));
    const parts = [bigTable(columns, table.rows, `Corpus: ${corpusTables[by]}`)];
    if (table.left_out) parts.unshift(make("p", { class: "hint" }, `${table.left_out} rows with less time are left out.`));
    place.replaceChildren(...parts);
  };
  const asked = address().query.get("by");
  const by = asked in corpusTables ? asked : "op";
  // tables are drawn once they are in the page
  setTimeout(() => draw(by));
  return [heading("Corpus"),
    make("p", { class: "hint" }, `${data.corpus.members.length} traces. Each model of a source counts alike in the share of time.`),
    make("div", { class: "controls" }, choice("By", Object.entries(corpusTables), by, draw)), place,
    make("h2", {}, "Traces"), plainTable(["trace", "source", "model", "run", "library"], data.corpus.members, "Traces", true)];
}

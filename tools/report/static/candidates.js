// implementations of operators that were judged: what they save, and a verdict for each signature
const verdicts = ["wrong", "failed", "slower", "undecided", "equal", "faster"];
const judgedRows = allRows.filter((row) => cell("verdict", row)).sort((one, other) =>
  verdicts.indexOf(cell("verdict", one)) - verdicts.indexOf(cell("verdict", other)));
const judgedColumns = ["verdict", "run", "trace", "op", "direction", "shapes", "count", "step_share", "median_us", "ratio_p50",
  "ratio_low", "ratio_high", "undecided_because", "step_saving", "doubts", "error", "export"];

// savings of traces and of their parts, without columns that are empty
function savingsTable(parts) {
  const names = ["trace", "part", "operators take", "saves", "±", "signatures", "slower", "broken"];
  const isFilled = (_, place) => parts.some((cells) => cells[place] !== "" && cells[place] !== null);
  const rows = parts.map((cells) => cells.map((value, place) =>
    (place >= 2 && place <= 4 ? percent(value, 1) : place === 1 && value === "" ? "whole step" : value)).filter(isFilled));
  return plainTable(names.filter(isFilled), rows, "Savings");
}

function candidatesView() {
  const parts = data.judgements.flatMap(({ run, lines, parts }) => [
    ...(several ? [make("h2", {}, run)] : []),
    ...lines.map((line) => make("p", {}, line)),
    ...(parts.length ? [savingsTable(parts)] : []),
  ]);
  return [heading("Candidates"), ...parts, make("h2", {}, "Signatures"),
    make("p", { class: "hint" }, "The ratio is the candidate's time divided by the operator's, with its 95 % interval."),
    bigTable(rowColumns(several ? judgedColumns : judgedColumns.filter((name) => name !== "run")), judgedRows, "Judged signatures")];
}

"""Separate package that registers an option, a column, an analysis, a source of cases, a result format and a mode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outside import FAILS, with_package
from programs import run_command, run_python, succeed

FAST = ("--iterations", "2", "--warmup", "0")
CALL = """
if __name__ == "__main__":
    from opgrip.replay import replay
    results = replay("powers:2", most_us=1, iterations=2, warmup=0)
    print(list(results.frame["op"]), (results.frame["over_us"] >= 0).all())
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    parts = dict.fromkeys(("opgrip.analyses", "opgrip.sources", "opgrip.reports"), "planted_parts")
    return with_package(tmp_path_factory.mktemp("parts"), {**parts, "opgrip.modes": "planted_modes"})


@pytest.mark.slow
def test_plugins_of_another_package_work_together(tmp_path: Path, environment: dict[str, str]) -> None:
    options = (*FAST, "--mode", "planted-same", "--most-us", "1", "-o", tmp_path / "out.json")
    done = succeed("opreplay", "powers:3", *options, env=environment)
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["most_us"] == 1
    assert [(row["op"], row["mode"]) for row in document["results"]] == [
        (f"pow{number}", mode) for number in range(3) for mode in ("eager", "planted-same")
    ]
    assert all(row["over_us"] == max(0.0, row["median_us"] - 1) for row in document["results"])
    assert "over us" in done.stdout
    assert "of 6 rows are over the budget" in done.stdout


@pytest.mark.slow
def test_result_format_of_a_plugin_is_written(tmp_path: Path, environment: dict[str, str]) -> None:
    options = (*FAST, "--top", "1", "--most-us", "5", "-o", tmp_path / "out.tally")
    succeed("opreplay", "powers:2", *options, env=environment)
    assert (tmp_path / "out.tally").read_text() == "powers:2 5 pow0\n"


def test_plugin_options_are_in_the_help_and_refused_without_effect(
    environment: dict[str, str],
) -> None:
    shown = run_command("opreplay", "--help-all", env=environment).stdout
    assert "budgets:" in shown
    assert "--most-us US" in shown
    refused = run_command("opreplay", "powers:2", "--tag", "x", env=environment)
    assert (refused.returncode, refused.stderr) == (
        2,
        "opreplay: error: --tag is for samples: leave it out with powers\n",
    )


@pytest.mark.slow
def test_plugin_options_are_keywords_of_replay(tmp_path: Path, environment: dict[str, str]) -> None:
    script = tmp_path / "call.py"
    script.write_text(CALL)
    done = run_python(script, env=environment, fresh=True)
    assert (done.returncode, done.stdout) == (0, "['pow0', 'pow1'] True\n"), done.stderr


@pytest.mark.slow
def test_failing_analysis_loses_no_row(tmp_path: Path, environment: dict[str, str]) -> None:
    output = tmp_path / "out.json"
    options = (*FAST, "-o", output)
    done = run_command("opreplay", "powers:3", *options, "--most-us", str(FAILS), env=environment)
    assert (done.returncode, output.exists()) == (2, False)
    assert "opreplay: error: no budget is so large: name another" in done.stderr
    again = succeed("opreplay", "powers:3", *options, "--resume", env=environment)
    assert "replaying 0 cases" in again.stderr
    assert len(json.loads(output.read_text())["results"]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]

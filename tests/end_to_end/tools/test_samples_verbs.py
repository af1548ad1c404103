"""The verbs on samples, run as a user runs them."""

from __future__ import annotations

from programs import refusal, run_command

from opgrip.samples import Tag, samples


def test_samples_are_listed_one_per_line_and_filtered() -> None:
    lines = run_command("opgrip", "samples", "list").stdout.splitlines()
    assert [line.split("\t")[0] for line in lines] == list(samples())
    views = run_command("opgrip", "samples", "list", "--tag", "viewattribute", "--source", "MMDetection").stdout
    assert 0 < len(views.splitlines()) < len(lines) or len(lines) == 1
    assert all("ViewAttribute" in line and "MMDetection" in line for line in views.splitlines())


def test_unknown_sample_tag_or_source_is_reported_in_one_line() -> None:
    for words, message in (
        (("list", "--tag", "Fast"), "unknown tag 'Fast': choose from ForLoop, "),
        (("list", "no_such*"), "no sample matches these names and tags: "),
        (("list", "--source", "nobody"), "no sample is from 'nobody': "),
        (("show", "bbox2dlta"), "unknown sample 'bbox2dlta': did you mean bbox2delta"),
    ):
        error = refusal("opgrip", "samples", *words, in_one_line=True)
        assert error.startswith(f"opgrip samples {words[0]}: error: {message}")


def test_sample_is_shown_with_its_inputs_and_source() -> None:
    shown = run_command("opgrip", "samples", "show", "bbox2delta").stdout
    assert "float32[128,4], float32[128,4]" in shown
    assert "https://github.com/open-mmlab/" in shown
    assert "def bbox2delta(" in shown


def test_tags_are_counted() -> None:
    lines = run_command("opgrip", "samples", "tags").stdout.splitlines()
    counts = {line.split()[0]: int(line.split()[1]) for line in lines}
    assert counts == {tag.value: sum(tag in sample.tags for sample in samples().values()) for tag in Tag}

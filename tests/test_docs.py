"""What the documentation shows runs, and what it lists is what there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from graphed_sampling import RequestTable, SamplingParams, backends

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
needs_sources = pytest.mark.skipif(not README.is_file(), reason="the sources are not here")


@needs_sources
@pytest.mark.parametrize(
    "name",
    ["README.md", "docs/prompt_logprobs.md", "docs/distributed.md", "docs/group_stats.md"],
)
def test_the_code_that_is_shown_runs(name: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), {})


@needs_sources
def test_the_readme_lists_every_parameter_with_its_default() -> None:
    table = README.read_text().split("## Parameters of a request")[1].split("## ")[0]
    defaults: dict[str, str] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`(\w+)`", cells[0]) if line.startswith("| `") else []
        values = [v.strip() for v in cells[1].split(",")] if names else []
        defaults |= dict(zip(names, values * (len(names) // max(len(values), 1)), strict=True))
    params = SamplingParams()
    assert set(defaults) == {f.name for f in fields(params)}
    for name, shown in defaults.items():
        value = getattr(params, name)
        expected = {"()": "[]"}.get(repr(value), repr(value)).replace("'", '"')
        assert shown == expected, name


@needs_sources
def test_the_readme_lists_every_backend() -> None:
    table = README.read_text().split("## Backends")[1].split("## ")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(backends.NAMES)
    for name in backends.NAMES:
        row = re.search(rf"^\| `{name}` .*$", table, re.MULTILINE)
        assert row is not None
        refuses = row.group().split("|")[4].strip()
        assert refuses == (", ".join(sorted(backends.module(name).REFUSES)) or "nothing")


@needs_sources
def test_links_between_the_documents_lead_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


@needs_sources
def test_the_sizes_in_the_documentation_are_those_of_a_default_table() -> None:
    sizes = RequestTable(1, 128256, device="cpu").bytes_per_slot
    text = (ROOT / "docs" / "engines.md").read_text()
    assert f"({sizes['params']:,} bytes" in text
    assert f"state record ({sizes['state']})" in text
    assert sizes["allowed_bits"] == 128256 // 8
    assert sizes["prompt_bits"] + sizes["output_bits"] == 128256 // 4
    assert sizes["counts"] == 4 * 128256


@needs_sources
def test_the_documentation_tells_what_scratch_a_row_takes() -> None:
    layout = RequestTable(1, 128256, device="cpu").layout
    words = [backends.module("triton").scratch_words(layout, rows) for rows in (1, 2)]
    text = (ROOT / "docs" / "engines.md").read_text()
    assert f"({4 * (words[1] - words[0]):,} at V = 128256" in text


@needs_sources
def test_the_page_on_flashinfer_lists_options_and_refusals() -> None:
    text = (ROOT / "docs" / "flashinfer.md").read_text()
    backend = backends.module("flashinfer")
    options = text.split("| option | values |")[1].split("\n\n")[0]
    found = {
        name: tuple(re.findall(r"`(\w+)`", values))
        for name, values in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", options, re.MULTILINE)
    }
    assert found == {name: v for name, v in backend.CHOICES.items() if len(v) > 1}
    refusals = text.split("| refused |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", refusals, re.MULTILINE)) == backend.REFUSES
    layout = RequestTable(1, 128256, device="cpu").layout
    words = [
        backends.module(name).scratch_words(layout, 2)
        - backends.module(name).scratch_words(layout, 1)
        for name in ("flashinfer", "triton")
    ]
    shown = f"some {round(4 * (words[0] - words[1]), -2):,} at V = 128256"
    assert shown in text and shown in (ROOT / "docs" / "engines.md").read_text()

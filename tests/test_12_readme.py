"""The README says what is so: its links lead somewhere, its lines are counted."""

import re
from pathlib import Path

import pytest

from desk import ROOT

FILES = [ROOT / "README.md", ROOT / "recipes" / "README.md", ROOT / "benchmarks" / "README.md"]
README = FILES[0].read_text()
ALL = "\n".join(file.read_text() for file in FILES)


def test_the_line_counts_are_counted() -> None:
    counts = re.findall(r"^\| \[`(\w+\.py)`\]\(\1\) \| (\d+) \|", README, re.MULTILINE)
    assert len(counts) == 5
    for file, lines in counts:
        assert len((ROOT / file).read_text().splitlines()) == int(lines), file


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_every_link_leads_to_a_file(file: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", file.read_text())
    inside = {link for link in links if not link.startswith("https://")}
    assert inside and not {link for link in inside if not (file.parent / link).is_file()}


def test_every_recipe_and_benchmark_is_named() -> None:
    files = [*ROOT.glob("recipes/*.py"), *ROOT.glob("benchmarks/*.py")]
    assert files and not [file.name for file in files if file.name not in ALL]

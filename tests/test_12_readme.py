"""The README says what is so: it quotes the loop, its names exist, its lines are counted."""

import inspect
import re
from pathlib import Path

import pytest

import refund_agent
from desk import ROOT

FILES = [ROOT / "README.md", ROOT / "recipes" / "README.md", ROOT / "benchmarks" / "README.md"]
README = FILES[0].read_text()
ALL = "\n".join(file.read_text() for file in FILES)


def section(title: str) -> str:
    return README.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_loop_is_quoted_word_for_word() -> None:
    quoted = re.findall("<!-- the loop.*-->\n```python\n(.*?)```\n<!--", README, re.DOTALL)
    assert quoted == [inspect.getsource(refund_agent.work)]


@pytest.mark.parametrize("title", ["One refund, step by step", "Copy it"])
def test_every_name_is_defined(title: str) -> None:
    sources = "\n".join(file.read_text() for file in ROOT.glob("*.py"))
    names = re.findall(r"`(\w+)`", section(title).partition("```python")[0])
    assert len(names) > 8
    assert [name for name in names if not re.search(rf"(def|class) {name}\b", sources)] == []


def test_the_line_counts_are_counted() -> None:
    counts = re.findall(r"^\| \[`(\w+\.py)`\]\(\1\) \| (\d+) \|", README, re.MULTILINE)
    assert len(counts) == 5
    for file, lines in counts:
        assert len((ROOT / file).read_text().splitlines()) == int(lines), file


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_every_link_leads_to_a_file(file: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)|<img src=\"([^\"]+)\"", file.read_text())
    inside = {link for pair in links for link in pair if link and not link.startswith("https://")}
    assert inside and not {link for link in inside if not (file.parent / link).exists()}


def test_every_recipe_and_benchmark_is_named() -> None:
    files = [*ROOT.glob("recipes/*.py"), *ROOT.glob("benchmarks/*.py")]
    assert files and not [file.name for file in files if file.name not in ALL]

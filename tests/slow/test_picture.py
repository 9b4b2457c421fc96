"""The picture of the README is drawn from a run, and an `<img>` can show it in both schemes."""

from pathlib import Path
from xml.etree import ElementTree

from desk import ROOT, ended

SVG = "{http://www.w3.org/2000/svg}"
MAX_BYTES = 30_000


async def test_the_picture_is_drawn_from_a_run(tmp_path: Path) -> None:
    file = tmp_path / "crash.svg"
    code, _, err = await ended(ROOT / "benchmarks" / "picture.py", file)
    assert code == 0, err
    drawn = file.read_text()
    picture = ElementTree.fromstring(drawn)
    assert picture.findtext(f"{SVG}title") and picture.findtext(f"{SVG}desc")
    assert len(drawn.encode()) < MAX_BYTES and "<script" not in drawn
    assert "@media (prefers-color-scheme: dark)" in drawn and "--page: #fff" in drawn
    assert "4 questions, 10 decisions" in drawn and "2 questions, 5 decisions" in drawn

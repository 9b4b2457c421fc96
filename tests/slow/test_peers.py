"""The comparison with other engines, for those that need no library of their own."""

from desk import ROOT, ended

COMPARE = ROOT / "benchmarks" / "peers" / "compare.py"


async def test_a_key_keeps_it_to_one_refund_in_every_engine_and_nothing_else_does() -> None:
    names = ("plain", "journal", "temporal")
    code, out, err = await ended(COMPARE, "--repeats", "1", "--only", *names)
    assert (code, err) == (0, "")
    rows = [line.split(" | ") for line in out.splitlines()[2:]]
    assert [row[4] for row in rows] == ["1 / 2"] * len(names)
    assert [row[3] for row in rows] == ["10, 4, 4", "5, 2, 2", "5, 2, 2"]

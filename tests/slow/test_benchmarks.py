"""The benchmarks as a stranger runs them: a subprocess, its exit code and its last line."""

import asyncio
import json
from typing import Any

from desk import ROOT, ended

SECONDS = 60


async def last_line(script: str, *arguments: str) -> dict[str, Any]:
    async with asyncio.timeout(SECONDS):
        code, out, err = await ended(ROOT / "benchmarks" / script, *arguments)
    assert code == 0, err
    counted: dict[str, Any] = json.loads(out.splitlines()[-1])
    return counted


async def test_a_fleet_makes_one_refund_each() -> None:
    counted = await last_line("fleet.py", "--agents", "3")
    expected = {"agents": 3, "refunds": 3, "cases": 3, "questions": 6, "extra_calls": 0, "kills": 0}
    assert expected.items() <= counted.items()


async def test_a_decider_that_queries_makes_history_grow_in_line_with_the_turns() -> None:
    counted = await last_line("history_growth.py", "--turns", "5", "10", "20")
    sizes: dict[str, list[int]] = {"sent": [], "queried": []}
    for row in counted["history_growth"]:
        sizes[row["way"]].append(row["bytes"])
    for way, (five, ten, twenty) in sizes.items():
        growth = (twenty - ten) / (ten - five)  # 2 in line, 4 with the square
        assert (growth > 3) == (way == "sent")

"""A kill at every point of a case, and what counts as a failed row of that table."""

import faulthandler
from typing import Any

import pytest

import crash_everywhere
from crash_everywhere import IN_FLIGHT, Row, verdict
from desk import ROOT, ended
from harness import DevServer
from refund_agent import RefundResult

EVERYWHERE = ROOT / "run_demo.py", "--crash", "everywhere"


async def test_a_point_that_is_never_reached_is_a_failed_row(server: DevServer) -> None:
    right, nowhere = Row("1235", ""), Row("1235", "before issue_refund 2")
    for row in (right, nowhere):
        row.server = server.address
        await row.play_alone()
    assert verdict(nowhere, right)[1] == ["this point was never reached"]


# The verdict, with made-up counts.

COUNTED = {name: 2 for name in Row("1235").count() if not name.startswith("seconds")}


class Made(Row):
    counted, result = COUNTED, RefundResult("denied", "We cannot.")

    def __init__(self, point: str = "", **more: Any) -> None:
        super().__init__("1235", point)
        self.result = more.pop("result", Made.result)
        self.counted = COUNTED | {name: COUNTED[name] + number for name, number in more.items()}

    def count(self) -> dict[str, Any]:
        return self.counted


def wrong_if(point: str, **more: Any) -> list[str]:
    return verdict(Made(point, **more), Made())[1]


@pytest.mark.parametrize(
    "point",
    [
        "before issue_refund 1",
        "in Workflow Task 1",
        "waiting for the customer 1",
        "after check_refund_policy 1",
    ],
)
def test_any_other_count_is_a_failed_row(point: str) -> None:
    changes = [wrong_if(point, **{name: more}) for name in COUNTED for more in (1, -1)]
    assert [len(wrong) for wrong in changes] == [1] * 2 * len(COUNTED)
    assert wrong_if(point) == []


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_only_the_call_in_flight_may_be_made_again_and_once(name: str) -> None:
    again = IN_FLIGHT[name]
    assert wrong_if(f"after {name} 1", **again) == []
    twice = {what: count + 1 for what, count in again.items()}
    assert len(wrong_if(f"after {name} 1", **twice)) == len(again)
    assert len(wrong_if(f"before {name} 1", **again)) == len(again)


@pytest.mark.parametrize("more", [0, 1])
async def test_a_failed_row_is_a_non_zero_exit(
    server: DevServer,
    more: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Played(Made):
        def __init__(self, order_id: str, point: str) -> None:
            super().__init__(point, refunds=-1 + (more if point else 0))

        async def play_alone(self) -> None: ...

    async def one_point(row: Row) -> list[str]:
        return ["in Workflow Task 4"]

    monkeypatch.setattr(crash_everywhere, "Row", Played)
    monkeypatch.setattr(crash_everywhere, "points_of", one_point)
    assert await crash_everywhere.kill_everywhere(server.address, "1235") == more
    out = capsys.readouterr().out
    assert ("FAILED: refunds: 2, not 1" in out) == bool(more) and f", {more} failures." in out


# The program.


async def test_the_whole_table(mark: None) -> None:
    faulthandler.cancel_dump_traceback_later()  # it may take longer than a test of the suite
    code, out, err = await ended(*EVERYWHERE)
    failed = [line for line in out.splitlines() if "FAILED" in line]
    assert (code, err, failed) == (0, "", []) and out.isascii()
    rows = [line.split("  ")[0] for line in out.splitlines()]
    before, after = (
        [row.removeprefix(kind) for row in rows if row.startswith(kind)]
        for kind in ("before ", "after ")
    )
    assert sorted(before) == sorted(after)
    assert {row.split()[0] for row in before} == IN_FLIGHT.keys() | {"check_refund_policy"}
    assert "47 crash points, 15 extra calls, 0 failures." in rows

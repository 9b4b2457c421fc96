"""A kill at every point of a case: one of every kind, and the whole table."""

import asyncio
import faulthandler
import signal
from collections import Counter
from typing import Any

import pytest
import pytest_asyncio

import crash_everywhere
import run_demo
from crash_everywhere import IN_FLIGHT, Row, points_of, verdict
from desk import ROOT, ended, program
from harness import DevServer
from refund_agent import RefundResult

SAMPLE = (
    "before lookup_order 1",
    "after issue_refund 1",
    "in Workflow Task 4",
    "waiting for the customer 2",
    "waiting for the reviewer 1",
)
NOWHERE = "before issue_refund 2"
ENDED = b"Ended; everything that was started is stopped."
EVERYWHERE = ROOT / "run_demo.py", "--crash", "everywhere"


@pytest_asyncio.fixture(scope="module")
async def rows(server: DevServer) -> dict[str, Row]:
    rows = {point: Row("1235", point) for point in ("", *SAMPLE, NOWHERE)}
    for row in rows.values():
        row.server = server.address
    await asyncio.gather(*(row.play_alone() for row in rows.values()))
    return rows


@pytest.mark.parametrize("point", SAMPLE)
def test_a_kill_at_any_kind_of_point_changes_nothing_else(rows: dict[str, Row], point: str) -> None:
    again, wrong = verdict(rows[point], rows[""])
    assert wrong == [] and rows[point].seconds_to_progress() > 0
    assert again == ({"lookups": 1, "calls to Stripe": 1} if "after" in point else {})


def test_a_point_that_is_never_reached_is_a_failed_row(rows: dict[str, Row]) -> None:
    assert verdict(rows[NOWHERE], rows[""])[1] == ["this point was never reached"]


async def test_the_points_are_all_that_the_uninterrupted_run_went_through(
    rows: dict[str, Row],
) -> None:
    points = await points_of(rows[""])
    kinds = Counter(point.split()[0] for point in points)
    assert kinds == {"before": 13, "after": 13, "in": 18, "waiting": 3}
    assert len(set(points)) == len(points) and set(SAMPLE) <= set(points)
    called = {point.split()[1] for point in points if "before" in point}
    assert called == IN_FLIGHT.keys() | {"check_refund_policy"}  # it calls nobody


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


@pytest.mark.parametrize(
    "result",
    [
        None,
        RefundResult("no answer", "We cannot."),
        RefundResult("denied", "We cannot.", remembered=True),
    ],
)
def test_another_ending_is_a_failed_row(result: RefundResult | None) -> None:
    assert wrong_if("in Workflow Task 1", result=result) == ["it ended otherwise"]


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


def test_a_person_cannot_answer_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run_demo.parse(["--crash", "everywhere", "--ask"])
    assert left.value.code == 2 and "leave out the rest" in capsys.readouterr().err


# The program.


async def test_an_interrupt_leaves_no_worker_behind(mark: None, server: DevServer) -> None:
    env = {"TEMPORAL_ADDRESS": await server.address()}
    async with program(*EVERYWHERE, env=env) as process:
        assert process.stdout
        while "not killed" not in (await process.stdout.readline()).decode():
            pass
        process.send_signal(signal.SIGTERM)
        _, err = await process.communicate()
    assert (process.returncode, err.strip()) == (143, ENDED)


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

"""A kill at every point of a case: one of every kind here, the whole table with `-m everywhere`."""

import asyncio
import faulthandler
import signal
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio
from conftest import reply, request_for
from test_demo import alive, demo

import crash_everywhere
import run_demo
from crash_everywhere import COUNTED, IN_FLIGHT, Ran, Setting, Table, verdict
from harness import Server, Tally
from refund_agent import RefundResult

SAMPLE = (
    "before lookup_order 1",
    "after issue_refund 1",
    "in Workflow Task 4",
    "waiting for the customer 2",
    "waiting for the reviewer 1",
)
NOWHERE = "before issue_refund 2"
LEFT_SECONDS = 5  # for the last process to be gone


@dataclass
class Played:
    recorded: Ran
    points: list[str]
    rows: Mapping[str, Ran]


@pytest_asyncio.fixture(scope="module")
async def played(server: Server) -> Played:
    rows: list[Ran] = []
    async with crash_everywhere.workers() as start_worker:
        setting = Setting(
            request_for("1235"),
            list(run_demo.ORDERS.values()),
            reply,
            server,
            f"case-{uuid.uuid4()}",
            start_worker,
        )
        recorded = await crash_everywhere.play(setting, "")
        points = await crash_everywhere.points_of(setting, recorded)
        await crash_everywhere.play_all(setting, (*SAMPLE, NOWHERE), rows.append)
    return Played(recorded, points, {row.point: row for row in rows})


@pytest.mark.parametrize("point", SAMPLE)
def test_a_kill_at_any_kind_of_point_changes_nothing_else(played: Played, point: str) -> None:
    judged = verdict(played.recorded, played.rows[point])
    assert judged.wrong == [] and played.rows[point].tally.kill_to_progress
    assert judged.again == (
        {"lookups": 1, "stripe_calls": 1} if point == "after issue_refund 1" else {}
    )


def test_a_point_that_is_never_reached_is_a_failed_row(played: Played) -> None:
    judged = verdict(played.recorded, played.rows[NOWHERE])
    assert judged.wrong == ["this point was never reached"]


def test_the_points_are_all_that_the_uninterrupted_run_went_through(played: Played) -> None:
    kinds = [point.split()[0] for point in played.points]
    assert kinds.count("before") == kinds.count("after") == 13 and kinds.count("in") == 18
    assert kinds.count("waiting") == 3 and len(set(played.points)) == len(kinds)
    assert {point.split()[1] for point in played.points if "before" in point} == IN_FLIGHT.keys()
    assert set(SAMPLE) <= set(played.points)


@pytest.mark.parametrize(("more", "code"), [(0, 0), (1, 1)])
def test_a_wrong_expectation_is_a_failed_row_and_a_non_zero_exit(
    played: Played, more: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = played.recorded.tally
    table = Table(replace(played.recorded, tally=replace(tally, refunds=tally.refunds + more)))
    table.add(played.rows["in Workflow Task 4"])
    assert table.end() == code
    out = capsys.readouterr().out
    assert ("FAILED: refunds 1, not 2" in out) == bool(code) and f", {code} failures." in out


# The verdict, with made-up runs.

RECORDED = Ran(
    "",
    Tally(**dict.fromkeys(COUNTED, 2), kill_to_progress=None, kill_to_refund=None, kill_to_end=0.0),
    RefundResult("denied", "We cannot."),
)


def counted(point: str, **more: int) -> Ran:
    changes = {what: getattr(RECORDED.tally, what) + count for what, count in more.items()}
    return replace(RECORDED, point=point, tally=replace(RECORDED.tally, **changes))


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
    changed = [counted(point, **{what: count}) for what in COUNTED for count in (1, -1)]
    assert all(len(verdict(RECORDED, ran).wrong) == 1 for ran in changed)
    assert verdict(RECORDED, counted(point)).wrong == []


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_only_the_call_in_flight_may_be_made_again_and_once(name: str) -> None:
    again = IN_FLIGHT[name]
    assert verdict(RECORDED, counted(f"after {name} 1", **again)).wrong == []
    twice = counted(f"after {name} 1", **{what: count + 1 for what, count in again.items()})
    assert len(verdict(RECORDED, twice).wrong) == len(again)
    assert len(verdict(RECORDED, counted(f"before {name} 1", **again)).wrong) == len(again)


@pytest.mark.parametrize(
    "result",
    [
        None,
        RefundResult("no answer", "We cannot."),
        RefundResult("denied", "We cannot.", remembered=True),
    ],
)
def test_another_ending_is_a_failed_row(result: RefundResult | None) -> None:
    ended = replace(RECORDED, point="in Workflow Task 1", result=result)
    assert verdict(RECORDED, ended).wrong == ["it ended otherwise"]


def test_a_person_cannot_answer_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run_demo.parse(["--crash", "everywhere", "--ask"])
    assert left.value.code == 2 and "leave out --ask" in capsys.readouterr().err


# The program.


@pytest.mark.everywhere
async def test_an_interrupt_leaves_no_worker_behind(server: Server) -> None:
    mark, env = str(uuid.uuid4()), {"TEMPORAL_ADDRESS": str(server.address)}
    async with demo(mark, "--crash", "everywhere", env=env) as process:
        assert process.stdout
        while "not killed" not in (await process.stdout.readline()).decode():
            pass
        process.send_signal(signal.SIGTERM)
        _, err = await process.communicate()
    assert (process.returncode, err) == (143, b"")
    deadline = time.monotonic() + LEFT_SECONDS
    while (left := alive(mark)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert left == []


@pytest.mark.everywhere
async def test_the_whole_table() -> None:
    faulthandler.cancel_dump_traceback_later()  # it may take longer than a test of the suite
    async with demo(str(uuid.uuid4()), "--crash", "everywhere", env={"TEMPORAL_ADDRESS": ""}) as it:
        out, err = await it.communicate()
    failed = [line for line in out.decode().splitlines() if "FAILED" in line]
    assert (it.returncode, err, failed) == (0, b"", []) and out.isascii()
    rows = [line.split("  ")[0] for line in out.decode().splitlines()]
    before, after = (
        [row.removeprefix(kind) for row in rows if row.startswith(kind)]
        for kind in ("before ", "after ")
    )
    assert sorted(before) == sorted(after)
    assert {row.split()[0] for row in before} == IN_FLIGHT.keys()
    assert "47 crash points, 15 extra calls, 0 failures." in rows

"""What the fake keeps of xmemory's rules: a write is a job, and one sent twice is two jobs."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from freezegun import freeze_time

from fake_xmemory import FakeXmemory, XmemoryAPIError, connection_lost

KIM = "Dr. Robert Kim: prefers e-mail"


@pytest.fixture
def memory() -> FakeXmemory:
    return FakeXmemory({"Customer": ["customer_id"], "RefundCase": ["case_id"]})


def change(operation: str, **values: Any) -> dict[str, Any]:
    wanted = {"key": {"case_id": "c1"}} | ({"values": values} if operation != "delete" else {})
    return {"object_mutation": {"object_type": "RefundCase", operation: wanted}}


def scope_to(**key: str) -> dict[str, Any]:
    return {"objects": [{"type": "Customer", "key": key}]}


async def write(memory: FakeXmemory, *mutations: dict[str, Any]) -> Any:
    return await memory.write(structured_mutations=mutations)


async def queue(memory: FakeXmemory, *mutations: dict[str, Any]) -> str:
    return (await memory.write_async(structured_mutations=mutations)).write_id


async def status(memory: FakeXmemory, *write_ids: str) -> list[str]:
    return [(await memory.write_status(write_id)).write_status for write_id in write_ids]


async def rows(memory: FakeXmemory, query: str = "refund case") -> list[Any]:
    return list((await memory.read(query, read_mode="raw-tables")).reader_result["rows"])


async def refusal(call: Awaitable[Any]) -> XmemoryAPIError:
    with pytest.raises(XmemoryAPIError) as caught:
        await call
    return caught.value


async def test_a_read_answers_in_one_text_unless_told_otherwise(memory: FakeXmemory) -> None:
    memory.put("RefundCase", {"case_id": "c1", "status": "open"})
    assert "c1" in (await memory.read("Which refund case is open?")).reader_result
    assert await rows(memory) == [["c1", "open"]]
    assert (await memory.read("weather")).reader_result is None  # the schema cannot hold it


async def test_a_scope_shows_the_record_it_names_and_no_other(memory: FakeXmemory) -> None:
    for name in ("anna", "bert"):
        memory.put("Customer", {"customer_id": name})
    found = await memory.read("customer", scope=scope_to(customer_id="anna"))
    assert "anna" in found.reader_result and "bert" not in found.reader_result
    others = await memory.read("refund case", scope=scope_to(customer_id="anna"))
    assert others.reader_result == ""


async def test_what_names_no_record_is_refused(memory: FakeXmemory) -> None:
    scoped = memory.read("refund case", scope=scope_to(customer_id="nobody"))
    keyless = {"object_mutation": {"object_type": "RefundCase", "create": {}}}
    for call in [
        scoped,
        *(write(memory, it) for it in (change("update"), change("delete"), keyless)),
    ]:
        error = await refusal(call)
        assert (error.status, error.code) == (400, "VALIDATION_ERROR")


BOTH = {"object_mutation": {"object_type": "RefundCase", "create": {}, "update": {}}}


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("read", {"query": "q", "read_mode": "nope"}),
        ("read", {"query": "q", "scope": scope_to()}),
        ("write", {}),
        ("write", {"text": "x", "structured_mutations": [change("create")]}),
        ("write", {"structured_mutations": ()}),
        ("write", {"text": "x", "extraction_logic": "regular"}),
        ("write", {"structured_mutations": [BOTH]}),
        ("write_async", {}),
    ],
)
async def test_wrong_arguments_are_never_sent(
    memory: FakeXmemory, method: str, arguments: Any
) -> None:
    with pytest.raises(ValueError):
        await getattr(memory, method)(**arguments)
    assert memory.calls == []


async def test_a_create_of_an_existing_key_is_refused(memory: FakeXmemory) -> None:
    await write(memory, change("create", status="open"))
    assert (await refusal(write(memory, change("create", status="paid")))).code == "CONFLICT"
    assert await rows(memory) == [["c1", "open"]]


async def test_a_null_clears_its_field_and_a_delete_the_row(memory: FakeXmemory) -> None:
    await write(memory, change("create", status="open"), change("update", status=None))
    assert await rows(memory) == [["c1"]]
    await write(memory, change("delete"))
    assert await rows(memory) == []


async def test_one_refused_mutation_refuses_its_whole_batch(memory: FakeXmemory) -> None:
    await write(memory, change("create", status="open"))
    batch = [change("update", status="paid"), change("delete"), change("update")]
    await refusal(write(memory, *batch))
    assert await rows(memory) == [["c1", "open"]]


async def test_a_job_that_is_ready_waits_for_older_ones(memory: FakeXmemory) -> None:
    with freeze_time() as clock:
        memory.job_seconds = 10
        older = await queue(memory, change("create", status="open"))
        memory.job_seconds = 1
        newer = await queue(memory, change("update", status="paid"))
        clock.tick(5)
        assert await status(memory, older, newer) == ["extracting", "extracted"]
        clock.tick(6)
        assert await status(memory, older, newer) == ["completed", "completed"]
    assert await rows(memory) == [["c1", "paid"]]


async def test_a_write_is_answered_and_read_once_it_is_applied(memory: FakeXmemory) -> None:
    memory.paused = True
    running = asyncio.create_task(write(memory, change("create")))
    await asyncio.sleep(0.03)
    assert not running.done() and await rows(memory) == []
    memory.paused = False
    assert (await running).changes["created"]["objects"] == [{"name": "RefundCase"}]
    assert await rows(memory) == [["c1"]]


async def test_a_job_tells_how_it_ended(memory: FakeXmemory) -> None:
    ids = [await queue(memory, change("create")) for _ in range(2)]
    good, bad = [await memory.write_status(write_id) for write_id in ids]
    assert (good.write_status, good.error_detail) == ("completed", None) and good.changes
    assert bad.write_status == "failed" and bad.error_detail and not bad.changes
    assert await status(memory, "nope") == ["not_found"]


@pytest.mark.parametrize(("forks", "people"), [(False, 1), (True, 2)])
async def test_a_text_written_twice_may_fork_the_person(forks: bool, people: int) -> None:
    memory = FakeXmemory({}, forks=forks)
    for _ in range(2):
        await memory.write(KIM)
    assert len(await rows(memory, "person")) == people


@pytest.mark.parametrize("acted", [False, True])
async def test_a_lost_write_may_have_acted_and_sent_again_is_another_job(
    memory: FakeXmemory, acted: bool
) -> None:
    memory.fail_next(connection_lost(), method="write_async", acted=acted)
    error = await refusal(memory.write_async(KIM))
    assert (error.status, error.code) == (None, None)
    assert len(await rows(memory, "person")) == acted
    assert (await memory.write_async(KIM)).write_id == f"w0000{1 + acted}"

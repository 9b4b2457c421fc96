"""What the fake keeps of xmemory's rules: a write is a job, and one sent twice is two jobs."""

import asyncio
import re
from collections.abc import Awaitable
from typing import Any

import pytest
from freezegun import freeze_time

from fake_xmemory import FakeXmemory, ValidationError, XmemoryAPIError, connection_lost

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


# --- Reads and writes ----------------------------------------------------------------------------


async def test_a_read_answers_in_one_text_unless_told_otherwise(memory: FakeXmemory) -> None:
    memory.put("RefundCase", {"case_id": "c1", "status": "open"})
    found = await memory.read("Which refund case is open?")
    assert isinstance(found.reader_result, str) and "c1" in found.reader_result
    assert (found.notice, found.related_types, list(found.reader_results)) == (None, None, [])


@pytest.mark.parametrize(("query", "read_mode", "answer"), [
    ("refund case", "raw-tables", {"columns": [], "rows": []}),
    ("refund case", "xresponse", {"objects": [], "relations": []}),
    ("weather", "raw-tables", None),  # the schema cannot hold it
])
async def test_no_match_is_an_empty_answer_and_no_such_concept_is_none(
        memory: FakeXmemory, query: str, read_mode: str, answer: Any) -> None:
    found = await memory.read(query, read_mode=read_mode)
    assert (found.reader_result, found.notice) == (answer, None)


@pytest.mark.parametrize("read_mode", ["single-answer", "raw-tables", "xresponse"])
async def test_a_scope_shows_the_record_it_names_and_no_other(
        memory: FakeXmemory, read_mode: str) -> None:
    for name in ("anna", "bert"):
        memory.put("Customer", {"customer_id": name})
        memory.put("RefundCase", {"case_id": f"case of {name}", "customer_id": name})
    anna = scope_to(customer_id="anna")
    found = await memory.read("customer", read_mode=read_mode, scope=anna)
    assert "anna" in str(found.reader_result) and "bert" not in str(found.reader_result)
    others = await memory.read("refund case", read_mode=read_mode, scope=anna)
    assert not re.search("anna|bert", str(others.reader_result))


async def test_what_names_an_absent_record_is_refused(memory: FakeXmemory) -> None:
    scoped = memory.read("refund case", scope=scope_to(customer_id="nobody"))
    for call in [scoped, write(memory, change("update")), write(memory, change("delete"))]:
        error = await refusal(call)
        assert (error.status, error.code) == (400, "VALIDATION_ERROR")


@pytest.mark.parametrize(("method", "arguments", "error"), [
    ("read", {"query": "q", "read_mode": "nope"}, ValidationError),
    ("read", {"query": "q", "scope": scope_to()}, ValidationError),
    ("write", {}, ValueError),
    ("write", {"text": "x", "structured_mutations": [change("create")]}, ValueError),
    ("write", {"structured_mutations": []}, ValueError),
    ("write", {"structured_mutations": [change("create")], "scope": scope_to()}, ValueError),
    ("write", {"text": "x", "extraction_logic": "regular"}, ValidationError),
    ("write", {"structured_mutations": [{"object_mutation": {
        "object_type": "RefundCase", "create": {}, "update": {}}}]}, ValidationError),
    ("write_async", {}, ValueError),
])
async def test_wrong_arguments_are_never_sent(
        memory: FakeXmemory, method: str, arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        await getattr(memory, method)(**arguments)
    assert memory.calls == []


async def test_a_create_is_listed_in_the_changes(memory: FakeXmemory) -> None:
    changes = (await write(memory, change("create"))).changes
    assert [made["name"] for made in changes["created"]["objects"]] == ["RefundCase"]


async def test_a_create_of_an_existing_key_is_refused(memory: FakeXmemory) -> None:
    await write(memory, change("create", status="open"))
    error = await refusal(write(memory, change("create", status="paid")))
    assert (error.status, error.code) in [(400, "VALIDATION_ERROR"), (409, "CONFLICT")]
    assert await rows(memory) == [["c1", "open"]]


async def test_the_same_update_twice_is_one_row(memory: FakeXmemory) -> None:
    await write(memory, change("create", status="open"))
    for _ in range(2):
        await write(memory, change("update", status="paid"))
    assert await rows(memory) == [["c1", "paid"]]


async def test_a_null_clears_its_field_and_a_delete_the_row(memory: FakeXmemory) -> None:
    await write(memory, change("create", status="open"), change("update", status=None))
    assert await rows(memory) == [["c1"]]
    await write(memory, change("delete"))
    assert await rows(memory) == []


async def test_one_refused_mutation_refuses_its_whole_batch(memory: FakeXmemory) -> None:
    await refusal(write(memory, change("create"), change("create")))
    assert await rows(memory) == []


# --- The queue -----------------------------------------------------------------------------------


async def test_a_job_takes_its_time_by_the_clock(memory: FakeXmemory) -> None:
    memory.job_seconds = 10
    with freeze_time() as clock:
        write_id = await queue(memory, change("create"))
        seen = await status(memory, write_id)
        for seconds in (1, 10):
            clock.tick(seconds)
            seen += await status(memory, write_id)
    assert seen == ["queued", "extracting", "completed"]


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
    assert await status(memory, (await running).write_id) == ["completed"]
    assert await rows(memory) == [["c1"]]


async def test_a_job_tells_how_it_ended(memory: FakeXmemory) -> None:
    ids = [await queue(memory, change("create")) for _ in range(2)]
    good, bad = [await memory.write_status(write_id) for write_id in ids]
    assert (good.write_status, bad.write_status) == ("completed", "failed")
    assert good.completed_at and good.changes and good.error_detail is None
    assert bad.completed_at is None and not bad.changes and bad.error_detail


async def test_a_status_may_be_one_that_no_client_knows(memory: FakeXmemory) -> None:
    memory.shown_status = "reindexing"
    write_id = await queue(memory, change("create"))
    assert await status(memory, write_id, "nope") == ["reindexing", "not_found"]


# --- Scoped texts --------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "text", "ended", "facts"), [
    ("reject", "Ann: likes tea", "completed", {"Ann": "likes tea", "Bo": "-"}),
    ("reject", "Bo: likes tea", "failed", {"Ann": "-", "Bo": "-"}),  # another that exists
    ("reject", "Cy: likes tea", "completed", {"Ann": "-", "Bo": "-", "Cy": "likes tea"}),
    ("drop", "Ann: likes tea", "completed", {"Ann": "likes tea", "Bo": "-"}),
    ("drop", "Bo: likes tea", "completed", {"Ann": "-", "Bo": "-"}),
    ("drop", "Cy: likes tea", "completed", {"Ann": "-", "Bo": "-"}),
])
async def test_a_text_changes_nothing_that_is_outside_its_scope(
        memory: FakeXmemory, mode: str, text: str, ended: str, facts: dict[str, str]) -> None:
    for name in ("Ann", "Bo"):
        memory.put("Person", {"name": name, "fact": "-"})
    scope = {"objects": [{"type": "Person", "key": {"name": "Ann"}}], "mode": mode}
    write_id = (await memory.write_async(text, scope=scope)).write_id
    done = await memory.write_status(write_id)
    assert done.write_status == ended and dict(await rows(memory, "person")) == facts
    skipped = mode == "drop" and facts == {"Ann": "-", "Bo": "-"}
    assert bool((done.changes or {}).get("skipped_out_of_scope")) == skipped


async def test_a_scope_that_drops_may_make_the_very_record_it_names(memory: FakeXmemory) -> None:
    scope = {"objects": [{"type": "Person", "key": {"name": "Cy"}}]}
    assert (await refusal(memory.write("Cy: likes tea", scope=scope))).code == "VALIDATION_ERROR"
    await memory.write("Cy: likes tea", scope={**scope, "mode": "drop"})
    assert await rows(memory, "person") == [["Cy", "likes tea"]]


# --- Twins and faults ----------------------------------------------------------------------------


@pytest.mark.parametrize(("forks", "people"), [(False, 1), (True, 2)])
async def test_a_text_written_twice_may_fork_the_person(forks: bool, people: int) -> None:
    memory = FakeXmemory({}, forks=forks)
    for _ in range(2):
        await memory.write(KIM)
    assert len(await rows(memory, "person")) == people


async def test_two_queued_texts_about_one_person_are_one_row(memory: FakeXmemory) -> None:
    memory.paused = True
    ids = [(await memory.write_async(KIM)).write_id for _ in range(2)]
    memory.paused = False
    assert await status(memory, *ids) == ["completed", "completed"]
    assert len(await rows(memory, "person")) == 1


@pytest.mark.parametrize("acted", [False, True])
@pytest.mark.parametrize("method", ["write", "write_async"])
async def test_a_lost_write_may_have_acted(memory: FakeXmemory, method: str, acted: bool) -> None:
    memory.fail_next(connection_lost(), method=method, acted=acted)
    error = await refusal(getattr(memory, method)(KIM))
    assert (error.status, error.code) == (None, None)
    assert len(await rows(memory, "person")) == acted


async def test_a_lost_answer_asked_for_again_is_two_jobs(memory: FakeXmemory) -> None:
    memory.fail_next(connection_lost(), method="write_async", acted=True)
    await refusal(memory.write_async(KIM))
    assert (await memory.write_async(KIM)).write_id == "w00002"
    assert await status(memory, "w00001", "w00002") == ["completed", "completed"]


@pytest.mark.parametrize("wanted", [
    {"status": 422, "code": "INVALID_INPUT"},  # every sub-query of a read failed
    {"status": 429, "code": "RATE_LIMITED", "retry_after": 7},
    {"status": 429, "code": "RATE_LIMITED", "retry_after": None},  # what a date becomes
    {"status": 402, "code": "QUOTA_EXCEEDED", "details": {"kind": "daily_quota_exceeded"}},
])
async def test_a_scripted_error_lasts_as_asked(memory: FakeXmemory, wanted: Any) -> None:
    memory.fail_next(XmemoryAPIError("scripted", **wanted), times=2)
    for error in [await refusal(memory.read("refund case")) for _ in range(2)]:
        assert {name: getattr(error, name) for name in wanted} == wanted
    assert await rows(memory) == []
    assert memory.counts() == {"read": 3}

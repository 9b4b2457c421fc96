"""What the fake keeps of xmemory's rules: a write is a job in a queue, and nothing removes a twin."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from freezegun import freeze_time

from fake_xmemory import FakeXmemory, ValidationError, XmemoryAPIError, connection_lost

KIM = "Dr. Robert Kim: prefers e-mail"


@pytest.fixture
def memory() -> FakeXmemory:
    return FakeXmemory({"Customer": ["customer_id"], "RefundCase": ["case_id"]})


def change(operation: str, case_id: str = "c1", **values: Any) -> dict[str, Any]:
    wanted = {"key": {"case_id": case_id}} | ({"values": values} if operation != "delete" else {})
    return {"object_mutation": {"object_type": "RefundCase", operation: wanted}}


def scope_to(customer_id: str) -> dict[str, Any]:
    return {"objects": [{"type": "Customer", "key": {"key": {"customer_id": customer_id}}}]}


async def write(memory: FakeXmemory, *mutations: dict[str, Any]) -> Any:
    return await memory.write(structured_mutations=mutations)


async def rows(memory: FakeXmemory, query: str = "refund case") -> list[list[Any]]:
    found: list[list[Any]] = (await memory.read(query, read_mode="raw-tables")).reader_result["rows"]
    return found


async def status(memory: FakeXmemory, *write_ids: str) -> list[str]:
    return [(await memory.write_status(write_id)).write_status for write_id in write_ids]


async def refusal(call: Coroutine[Any, Any, Any]) -> XmemoryAPIError:
    with pytest.raises(XmemoryAPIError) as caught:
        await call
    return caught.value


# --- Reads ---------------------------------------------------------------------------------------


async def test_a_read_gives_one_answer_as_text_unless_told_otherwise(memory: FakeXmemory) -> None:
    memory.put("RefundCase", {"case_id": "c1", "status": "open"})
    found = await memory.read("Which refund case is open?")
    assert "c1" in found.reader_result and isinstance(found.reader_result, str)
    assert (found.notice, found.related_types, list(found.reader_results)) == (None, None, [])


@pytest.mark.parametrize(("read_mode", "nothing"), [
    ("raw-tables", {"columns": [], "rows": []}),
    ("xresponse", {"objects": [], "relations": []}),
])
async def test_no_match_is_an_empty_answer_without_a_notice(
        memory: FakeXmemory, read_mode: str, nothing: dict[str, Any]) -> None:
    found = await memory.read("refund case", read_mode=read_mode)
    assert (found.reader_result, found.notice) == (nothing, None)


async def test_a_concept_outside_the_schema_has_no_answer(memory: FakeXmemory) -> None:
    assert (await memory.read("the weather", read_mode="raw-tables")).reader_result is None


async def test_an_object_has_typed_fields(memory: FakeXmemory) -> None:
    memory.put("RefundCase", {"case_id": "c1", "amount": 1500})
    [found] = (await memory.read("refund case", read_mode="xresponse")).reader_result["objects"]
    assert found["name"] == "RefundCase"
    assert {"name": "amount", "value": {"integer_value": 1500}} in found["fields"]


@pytest.mark.parametrize("read_mode", ["single-answer", "raw-tables", "xresponse"])
async def test_a_scope_never_shows_the_rows_of_another_customer(
        memory: FakeXmemory, read_mode: str) -> None:
    for customer in ("anna", "bert"):
        memory.put("Customer", {"customer_id": customer})
        memory.put("RefundCase", {"case_id": f"case of {customer}", "customer_id": customer})
    for query in ("refund case", "customer"):
        found = await memory.read(query, read_mode=read_mode, scope=scope_to("anna"))
        assert "anna" in str(found.reader_result)
        assert "bert" not in str(found.reader_result)


async def test_a_scope_to_a_record_that_is_not_there_is_refused(memory: FakeXmemory) -> None:
    error = await refusal(memory.read("refund case", scope=scope_to("nobody")))
    assert (error.status, error.code) == (400, "VALIDATION_ERROR")


# --- Arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "error"), [
    ({}, ValueError),
    ({"text": "x", "structured_mutations": [change("create")]}, ValueError),
    ({"structured_mutations": []}, ValueError),
    ({"structured_mutations": [change("create")], "scope": scope_to("anna")}, ValueError),
    ({"text": "x", "extraction_logic": "regular"}, ValidationError),
    ({"structured_mutations": [{"object_mutation": {
        "object_type": "RefundCase", "create": {}, "update": {}}}]}, ValidationError),
    ({"structured_mutations": [{"object_mutation": {"object_type": "T"}}]}, ValidationError),
])
@pytest.mark.parametrize("method", ["write", "write_async"])
async def test_a_write_with_wrong_arguments_is_never_sent(
        memory: FakeXmemory, method: str, wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        await getattr(memory, method)(**wrong)
    assert memory.calls == []


@pytest.mark.parametrize("wrong", [
    {"read_mode": "nope"},
    {"scope": {"objects": [{"type": "Customer", "key": {"key": {}}}]}},
])
async def test_a_read_with_wrong_arguments_is_never_sent(
        memory: FakeXmemory, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        await memory.read("refund case", **wrong)
    assert memory.calls == []


# --- Structured writes ---------------------------------------------------------------------------


async def test_a_create_is_listed_in_the_changes(memory: FakeXmemory) -> None:
    changes = (await write(memory, change("create"))).changes
    assert [made["name"] for made in changes["created"]["objects"]] == ["RefundCase"]
    assert await rows(memory) == [["c1"]]


async def test_a_create_of_an_existing_key_is_refused(memory: FakeXmemory) -> None:
    await write(memory, change("create", status="open"))
    error = await refusal(write(memory, change("create", status="paid")))
    assert (error.status, error.code) in [(400, "VALIDATION_ERROR"), (409, "CONFLICT")]
    assert await rows(memory) == [["c1", "open"]]


async def test_the_same_update_twice_is_one_row_with_the_same_values(memory: FakeXmemory) -> None:
    await write(memory, change("create", status="open"))
    for _ in range(2):
        await write(memory, change("update", status="paid"))
    assert await rows(memory) == [["c1", "paid"]]


@pytest.mark.parametrize("operation", ["update", "delete"])
async def test_a_change_of_a_missing_key_is_refused(memory: FakeXmemory, operation: str) -> None:
    error = await refusal(write(memory, change(operation)))
    assert (error.status, error.code) == (400, "VALIDATION_ERROR")
    assert await rows(memory) == []


async def test_a_null_clears_its_field_and_a_delete_the_row(memory: FakeXmemory) -> None:
    await write(memory, change("create", status="open"))
    await write(memory, change("update", status=None))
    assert await rows(memory) == [["c1"]]
    await write(memory, change("delete"))
    assert await rows(memory) == []


async def test_one_refused_mutation_refuses_the_whole_batch(memory: FakeXmemory) -> None:
    await refusal(write(memory, change("create", "c1"), change("create", "c1")))
    assert await rows(memory) == []


# --- The queue -----------------------------------------------------------------------------------


async def test_a_job_takes_its_time_by_the_clock(memory: FakeXmemory) -> None:
    memory.job_seconds = 10
    with freeze_time() as clock:
        job = await memory.write_async(KIM)
        seen = await status(memory, job.write_id)
        for seconds in (1, 10):
            clock.tick(seconds)
            seen += await status(memory, job.write_id)
    assert seen == ["queued", "extracting", "completed"]


async def test_a_job_that_is_ready_waits_for_the_older_ones(memory: FakeXmemory) -> None:
    with freeze_time() as clock:
        memory.job_seconds = 10
        older = await memory.write_async(structured_mutations=[change("create", status="open")])
        memory.job_seconds = 1
        newer = await memory.write_async(structured_mutations=[change("update", status="paid")])
        clock.tick(5)
        assert await status(memory, older.write_id, newer.write_id) == ["extracting", "extracted"]
        clock.tick(6)
        assert await status(memory, newer.write_id) == ["completed"]
    assert await rows(memory) == [["c1", "paid"]]


async def test_a_read_sees_completed_jobs_only(memory: FakeXmemory) -> None:
    memory.paused = True
    await memory.write_async(structured_mutations=[change("create")])
    assert await rows(memory) == []
    memory.paused = False
    assert await rows(memory) == [["c1"]]


async def test_a_write_returns_once_its_own_job_is_applied(memory: FakeXmemory) -> None:
    memory.paused = True
    running = asyncio.create_task(write(memory, change("create")))
    await asyncio.sleep(0.03)
    assert not running.done()
    memory.paused = False
    assert await status(memory, (await running).write_id) == ["completed"]


async def test_a_job_tells_how_it_ended(memory: FakeXmemory) -> None:
    jobs = [await memory.write_async(structured_mutations=[change("create")]) for _ in range(2)]
    good, bad = [await memory.write_status(job.write_id) for job in jobs]
    assert (good.write_status, bad.write_status) == ("completed", "failed")
    assert (good.error_detail, bad.changes, bad.completed_at) == (None, None, None)
    assert good.completed_at is not None and good.changes and bad.error_detail


async def test_an_id_that_was_never_given_out_is_not_found(memory: FakeXmemory) -> None:
    assert await status(memory, "nope") == ["not_found"]


async def test_a_status_can_be_shown_that_nobody_knows(memory: FakeXmemory) -> None:
    memory.shown_status = "reindexing"
    job = await memory.write_async(KIM)
    assert await status(memory, job.write_id) == ["reindexing"]


# --- Twins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("forks", "people"), [(False, 1), (True, 2)])
async def test_a_text_written_twice_may_fork_the_person(forks: bool, people: int) -> None:
    memory = FakeXmemory({}, forks=forks)
    for _ in range(2):
        await memory.write(KIM)
    assert len(await rows(memory, "person")) == people


async def test_two_queued_texts_about_one_person_end_in_one_row(memory: FakeXmemory) -> None:
    memory.paused = True
    jobs = [await memory.write_async(KIM) for _ in range(2)]
    memory.paused = False
    assert await status(memory, *[job.write_id for job in jobs]) == ["completed", "completed"]
    assert len(await rows(memory, "person")) == 1


async def test_a_lost_answer_leaves_a_job_and_asking_again_makes_another(
        memory: FakeXmemory) -> None:
    memory.fail_next(connection_lost(), method="write_async", acted=True)
    error = await refusal(memory.write_async(KIM))
    again = await memory.write_async(KIM)
    assert (error.status, error.code) == (None, None)
    assert again.write_id == "w00002"
    assert await status(memory, "w00001", "w00002", "w00003") == ["completed"] * 2 + ["not_found"]


@pytest.mark.parametrize("acted", [False, True])
@pytest.mark.parametrize("method", ["write", "write_async"])
async def test_a_lost_write_may_or_may_not_have_acted(
        memory: FakeXmemory, method: str, acted: bool) -> None:
    memory.fail_next(connection_lost(), method=method, acted=acted)
    await refusal(getattr(memory, method)(KIM))
    assert len(await rows(memory, "person")) == acted


# --- Scripted errors -----------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [
    {"status": 422, "code": "INVALID_INPUT"},  # every sub-query of a read failed
    {"status": 429, "code": "RATE_LIMITED", "retry_after": 7},
    {"status": 429, "code": "RATE_LIMITED", "retry_after": None},  # what a date becomes
    {"status": 402, "code": "QUOTA_EXCEEDED",
     "details": {"kind": "daily_quota_exceeded", "retry_after_seconds": 9000}},
])
async def test_a_scripted_error_keeps_its_attributes(
        memory: FakeXmemory, wanted: dict[str, Any]) -> None:
    memory.fail_next(XmemoryAPIError("scripted", **wanted))
    error = await refusal(memory.read("refund case"))
    assert {name: getattr(error, name) for name in wanted} == wanted


async def test_a_fault_lasts_as_many_calls_of_its_method_as_asked(memory: FakeXmemory) -> None:
    memory.fail_next(connection_lost(), times=2)
    await memory.write(KIM)
    for _ in range(2):
        await refusal(memory.read("person"))
    assert len(await rows(memory, "person")) == 1
    assert memory.counts() == {"write": 1, "read": 3}

"""The recipe for long conversations: nothing is lost where one run ends and the next begins."""

import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import CancelledError
from temporalio.worker import Worker

from desk import ROOT, ended
from recipes.long_case import END, Conversation, LongCase, Replies, Reply

Case = WorkflowHandle[LongCase, int]
PER_RUN = 2


def worker(client: Client, queue: str, reply: Reply) -> Worker:
    """Without a cache, so that every Workflow Task and every Query is a replay."""
    return Worker(
        client,
        task_queue=queue,
        workflows=[LongCase],
        activities=[Replies(reply).reply],
        max_cached_workflows=0,
    )


async def start(client: Client, first: str) -> Case:
    queue, empty = str(uuid.uuid4()), Conversation(turns_per_run=PER_RUN)
    return await client.start_workflow(
        LongCase.run,
        empty,
        id=queue,
        task_queue=queue,
        start_signal="say",
        start_signal_args=[first],
    )


def this_case() -> WorkflowHandle[Any, Any]:
    return activity.client().get_workflow_handle(activity.info().workflow_id or "")


async def lengths(client: Client, case: Case) -> list[int]:
    """How many events each run has."""
    found, run_id = list[int](), case.first_execution_run_id
    while run_id:
        run = client.get_workflow_handle(case.id, run_id=run_id)
        history = await run.fetch_history()
        found.append(len(history.events))
        last = history.events[-1].workflow_execution_continued_as_new_event_attributes
        run_id = last.new_execution_run_id
    return found


async def test_signals_that_come_as_a_run_ends_are_read_once_and_in_order(client: Client) -> None:
    async def reply(said: Sequence[str]) -> str:
        number = len(said) // 2 + 1
        # It is handled in the very task in which every second run continues as new.
        await this_case().signal(LongCase.say, str(number) if number < 9 else END)
        return f"re {said[-1]}"

    case = await start(client, "0")
    async with worker(client, case.id, reply):
        assert await case.result() == 9
        said = await case.query(LongCase.conversation, 99)
    assert said == [text for number in range(9) for text in (f"{number}", f"re {number}")]
    runs = await lengths(client, case)
    assert len(runs) == 1 + 9 // PER_RUN and max(runs) < 12 * (PER_RUN + 1)


async def test_a_cancel_that_comes_as_a_run_ends_ends_the_case(client: Client) -> None:
    async def reply(said: Sequence[str]) -> str:
        ends = len(said) == 2 * PER_RUN - 1
        await (this_case().cancel() if ends else this_case().signal(LongCase.say, "more"))
        return "yes"

    case = await start(client, "hello")
    async with worker(client, case.id, reply):
        with pytest.raises(WorkflowFailureError) as failed:
            await case.result()
    assert isinstance(failed.value.cause, CancelledError)
    assert len(await lengths(client, case)) == 1


async def test_another_attempt_reads_the_same_texts(client: Client) -> None:
    seen = list[Sequence[str]]()

    async def reply(said: Sequence[str]) -> str:
        seen.append(said)
        if len(seen) == 1:
            await this_case().signal(LongCase.say, END)  # it is not among them
            raise ConnectionError
        return "yes"

    case = await start(client, "hello")
    async with worker(client, case.id, reply):
        assert await case.result() == 1
    assert seen == [["hello"]] * 2


async def test_the_recipe_loses_nothing() -> None:
    code, out, err = await ended(ROOT / "recipes" / "long_case.py")
    assert (code, err) == (0, "") and "150 turns, every message replied to once" in out

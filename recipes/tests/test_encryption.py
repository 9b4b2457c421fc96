"""The recipe that encrypts what Event History holds."""

import asyncio
import base64
import json
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from temporalio import activity, workflow
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle, WorkflowHistory
from temporalio.common import RetryPolicy
from temporalio.converter import DataConverter
from temporalio.exceptions import ApplicationError
from temporalio.worker import Replayer, Worker

import run_demo
from desk import ROOT, Desk
from harness import DevServer
from memory_activities import MemoryActivities
from refund_agent import Case, RefundAgent

pytest.importorskip(
    "cryptography", reason="cryptography is not installed: pip install -e '.[encryption]'"
)

from recipes.encryption import (  # noqa: E402
    EncryptionCodec,
    MalformedKeys,
    Tampered,
    UnknownKey,
    encrypting,
)

RECIPE = ROOT / "recipes" / "encryption.py"
A = base64.b64encode(b"a" * 32).decode()
B = base64.b64encode(b"b" * 32).decode()
OLD, NEW, ROTATED = f"old-key:{A}", f"new-key:{B}", f"new-key:{B}, old-key:{A}"
CANARY = "canary of the customer"
SLOWEST = timedelta(seconds=50)  # of a Workflow here; then something is wrong


def shown(value: Any) -> str:
    """Whatever can be read in an exported history: names, and texts that are JSON, base64 or a
    Payload inside another text, at any depth."""
    if isinstance(value, dict):
        return "\n".join(f"{name}\n{shown(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "\n".join(map(shown, value))
    found = [str(value)]
    with suppress(ValueError):
        if isinstance(inner := json.loads(str(value)), dict | list | str):
            found.append(shown(inner))
    with suppress(ValueError):
        if inside := base64.b64decode(str(value), validate=True):
            found.append(shown(inside.decode("latin-1")))
    return "\n".join(found)


def text_of(history: WorkflowHistory) -> str:
    return shown(json.loads(history.to_json()))


async def connected(server: DevServer, converter: DataConverter) -> Client:
    return await server.client(data_converter=converter, plugins=[run_demo.DemoWorker("demo")])


async def event(case: WorkflowHandle[Any, Any], wanted: EventType.ValueType) -> Any:
    """The first such event, as soon as it is there."""
    async for each in case.fetch_history_events(wait_new_event=True):
        if each.event_type == wanted:
            return each
    raise AssertionError("the run ended without it")


async def finished(desk: Desk, case: Case, client: Client) -> str:
    """What a Worker and people with this client make of the case."""
    desk.client = client
    mine: Case = client.get_workflow_handle_for(RefundAgent.run, case.id)
    async with desk.worker():
        return str((await desk.result_of(mine)).outcome)


# --- What can be read -----------------------------------------------------------------------------


async def case_of(server: DevServer, converter: DataConverter) -> tuple[Desk, Case]:
    desk = Desk(await connected(server, converter))
    orders = desk.world.shop.orders
    orders["1234", 1] = replace(orders["1234", 1], item="the teapot of the customer")
    async with desk.open() as case:
        assert (await case.result()).outcome == "refund succeeded"
    return desk, case


def texts_of(desk: Desk) -> list[str]:
    """What the case knows of its customer."""
    intent = desk.world.shop.orders["1234", 1].payment_intent
    refunds = [each for each, it in desk.world.stripe.refunds.items() if it["metadata"]]
    assert refunds
    return [
        "Please refund order",
        *run_demo.SCRIPT.values(),
        "the teapot of the customer",
        "refund succeeded",
        "Your refund of",
        '"ada"',
        '"1234"',
        "customer_id",
        intent,
        refunds[-1],
    ]


async def test_an_exported_history_shows_no_text_of_the_customer(server: DevServer) -> None:
    desk, case = await case_of(server, encrypting(OLD))
    exported = text_of(await case.fetch_history())
    texts = [text for text in texts_of(desk) if text != "customer_id"]  # the name of the memo field
    assert not [text for text in texts if text in exported]
    assert await (await case.describe()).memo_value("customer_id") == "ada"


async def test_without_the_codec_it_shows_all_of_them(server: DevServer) -> None:
    desk, case = await case_of(server, DataConverter.default)
    exported = text_of(await case.fetch_history())
    assert not [text for text in texts_of(desk) if text not in exported]


@activity.defn
async def leaks(text: str) -> str:
    activity.heartbeat(text)
    raise ApplicationError(text, {"detail": text}, type="Leaks")


@workflow.defn(sandboxed=False)
class Talks:
    """Says its text wherever Temporal stores one."""

    @workflow.init
    def __init__(self, text: str) -> None:
        self.text, self.heard = text, ""

    @workflow.run
    async def run(self, text: str) -> str:
        workflow.set_current_details(text)
        await workflow.wait_condition(lambda: bool(self.heard))
        await workflow.sleep(0.01, summary=text)
        workflow.upsert_memo({"told": text})
        await workflow.execute_activity(
            leaks,
            text,
            summary=text,
            start_to_close_timeout=SLOWEST,
            heartbeat_timeout=SLOWEST,
            retry_policy=RetryPolicy(maximum_attempts=2, initial_interval=timedelta(seconds=0.01)),
        )
        return text

    @workflow.signal
    def hear(self, text: str) -> None:
        self.heard = text

    @workflow.update
    def repeat(self, text: str) -> str:
        return text

    @workflow.query
    def said(self) -> str:
        return self.text


@asynccontextmanager
async def talking(client: Client) -> AsyncIterator[WorkflowHandle[Talks, str]]:
    queue = f"talks-{uuid.uuid4()}"
    async with Worker(client, task_queue=queue, workflows=[Talks], activities=[leaks]):
        handle = await client.start_workflow(
            Talks.run,
            CANARY,
            id=queue,
            task_queue=queue,
            memo={"topic": CANARY},
            static_summary=CANARY,
            static_details=CANARY,
            execution_timeout=SLOWEST,
        )
        assert await handle.query(Talks.said) == CANARY
        assert await handle.execute_update(Talks.repeat, CANARY) == CANARY
        await handle.signal(Talks.hear, CANARY)
        with pytest.raises(WorkflowFailureError) as failed:
            await handle.result()
        cause: Any = failed.value.cause.__cause__
        seen = cause.message, cause.type, cause.details
        assert seen == (CANARY, "Leaks", ({"detail": CANARY},))
        yield handle


async def test_whatever_says_a_text_only_its_names_are_in_clear(server: DevServer) -> None:
    async with talking(await connected(server, encrypting(OLD))) as handle:
        described = await handle.describe()
        exported = text_of(await handle.fetch_history())
    assert CANARY not in exported and CANARY not in str(described.raw_description)
    for name in (handle.id, "Talks", "leaks", "hear", "repeat", "topic", "Leaks", "old-key"):
        assert name in exported


async def test_the_reason_of_a_terminate_is_in_clear_and_its_details_are_not(
    server: DevServer,
) -> None:
    client, id = await connected(server, encrypting(OLD)), f"ended-{uuid.uuid4()}"
    handle = await client.start_workflow(Talks.run, CANARY, id=id, task_queue=id)
    await handle.terminate(CANARY, reason="as its owner wished")
    exported = text_of(await handle.fetch_history())
    assert "as its owner wished" in exported and CANARY not in exported
    assert f'"{id}"' in (await handle.fetch_history()).to_json()  # the Task Queue


async def test_messages_of_failures_need_their_own_converter(server: DevServer) -> None:
    codec_alone = DataConverter(payload_codec=EncryptionCodec(OLD))
    async with talking(await connected(server, codec_alone)) as handle:
        assert CANARY in text_of(await handle.fetch_history())


async def test_a_client_without_the_codec_sees_only_ciphertext(server: DevServer) -> None:
    outsider = await connected(server, DataConverter.default)
    async with talking(await connected(server, encrypting(OLD))) as handle:
        theirs = outsider.get_workflow_handle(handle.id)
        described = await theirs.describe()
        ask = partial(theirs.query, "said")
        for look in (described.memo, described.static_summary, ask, theirs.result):
            with pytest.raises(KeyError, match="Unknown payload encoding binary/encrypted"):
                await look()


# --- Keys -----------------------------------------------------------------------------------------


async def opened(server: DevServer, keys: str) -> tuple[Desk, Case]:
    """A case that waits for its customer, and no Worker."""
    desk = Desk(await connected(server, encrypting(keys)))
    async with desk.worker():
        case = await desk.start()
        await event(case, EventType.EVENT_TYPE_TIMER_STARTED)
    return desk, case


async def test_without_the_key_a_case_stands_still_and_with_it_goes_on(server: DevServer) -> None:
    desk, case = await opened(server, OLD)
    mine, desk.client = desk.client, await connected(server, encrypting(NEW))
    async with desk.worker():
        await case.signal("review", "anything")
        failed = await event(case, EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED)
    failure = failed.workflow_task_failed_event_attributes.failure
    assert failure.application_failure_info.type == "UnknownKey"
    assert await finished(desk, case, mine) == "refund succeeded"
    assert desk.world.count()["refunds"] == 1


async def test_an_activity_without_the_key_is_tried_again(server: DevServer) -> None:
    desk = Desk(await connected(server, encrypting(OLD)))
    case, keyless = await desk.start(), await connected(server, encrypting(NEW))
    memory = MemoryActivities(desk.world.xmemory).all()
    async with (
        Worker(desk.client, task_queue=desk.queue, workflows=[RefundAgent]),
        Worker(keyless, task_queue=desk.queue, activities=memory),
    ):
        types = await tried(case)
    assert types == {"UnknownKey"} and not desk.world.count()["calls to xmemory"]
    assert await finished(desk, case, desk.client) == "refund succeeded"


async def tried(case: Case) -> set[str]:
    """Why the Activities that are under way failed last, when one has."""
    while True:
        pending = (await case.describe()).raw_description.pending_activities
        causes = [each.last_failure.cause for each in pending]
        types = {each.application_failure_info.type for each in causes} - {""}
        if types:
            return types
        await asyncio.sleep(run_demo.POLL_SECONDS)


async def test_a_history_does_not_replay_without_its_key(server: DevServer) -> None:
    _, case = await opened(server, OLD)
    replayer = Replayer(workflows=[RefundAgent], data_converter=encrypting(NEW))
    with pytest.raises(Exception, match="UnknownKey|old-key|Encoded failure"):
        await replayer.replay_workflow(await case.fetch_history())


# --- The codec ------------------------------------------------------------------------------------


def in_clear(text: str = CANARY) -> Payload:
    return DataConverter.default.payload_converter.to_payloads([text])[0]


async def encrypted(keys: str = OLD) -> Payload:
    (payload,) = await EncryptionCodec(keys).encode([in_clear()])
    return payload


async def decoded(payload: Payload, keys: str = OLD) -> Sequence[Payload]:
    return await EncryptionCodec(keys).decode([payload])


async def test_every_key_decrypts_the_first_encrypts_and_no_two_ciphertexts_are_alike() -> None:
    one, other, rotated = await encrypted(), await encrypted(), await encrypted(ROTATED)
    assert one.data != other.data and one.metadata == other.metadata != rotated.metadata
    for payload in (one, other, rotated):
        assert await decoded(payload, ROTATED) == [in_clear()]
    assert await decoded(in_clear()) == [in_clear()]  # from before


async def test_an_unknown_key_is_named_and_nothing_else() -> None:
    with pytest.raises(UnknownKey) as unknown:
        await decoded(await encrypted(), NEW)
    assert "'old-key'" in str(unknown.value)
    assert A not in str(unknown.value) and B not in str(unknown.value)


async def test_a_payload_that_was_changed_is_refused() -> None:
    payload = await encrypted()
    for place in range(len(payload.data)):
        changed = Payload()
        changed.CopyFrom(payload)
        changed.data = bytes(byte ^ (n == place) for n, byte in enumerate(payload.data))
        with pytest.raises(Tampered):
            await decoded(changed)
    for data in (b"", payload.data[:10], payload.data[:-1]):
        with pytest.raises(Tampered):
            await decoded(Payload(metadata=payload.metadata, data=data))


async def test_a_payload_is_bound_to_the_name_of_its_key() -> None:
    renamed = await encrypted()
    renamed.metadata["encryption-key-id"] = b"other"
    with pytest.raises(Tampered):
        await decoded(renamed, f"{OLD},other:{A}")


@pytest.mark.parametrize(
    ("keys", "entry"),
    [
        ("", 1),
        (A, 1),
        ("old-key", 1),
        (f"old key:{A}", 1),
        (f"old-key:{A[:-4]}", 1),
        (f"old-key:{A[:-1]}", 1),
        (f"old-key:{A}{A}", 1),
        (f"old-key:!{A[1:]}", 1),
        (f"{OLD},", 2),
        (f"{OLD},{NEW},old-key:{B}", 3),
    ],
)
def test_malformed_keys_are_refused_and_not_shown(keys: str, entry: int) -> None:
    with pytest.raises(MalformedKeys, match=f"PAYLOAD_KEYS: entry {entry} ") as refused:
        encrypting(keys)
    assert A[:8] not in str(refused.value) and B[:8] not in str(refused.value)


def test_the_recipe_shows_it() -> None:
    ran = subprocess.run([sys.executable, str(RECIPE)], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert "in which 4 of 4 texts" in ran.stdout and "in which 0 of 4 texts" in ran.stdout


def test_without_the_library_the_recipe_says_what_to_install() -> None:
    without = "import sys, runpy; sys.modules['cryptography'] = None; runpy.run_path(sys.argv[1])"
    ran = subprocess.run(
        [sys.executable, "-c", without, str(RECIPE)], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        "cryptography is not installed. Install it with: pip install -e '.[encryption]'\n"
    )

"""The recipe that encrypts what Event History holds."""

import base64
from collections.abc import Sequence
from typing import Any

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHandle
from temporalio.converter import DataConverter

import run_demo
from desk import ROOT, Desk, ended
from harness import DevServer
from refund_agent import Case, RefundAgent

pytest.importorskip(
    "cryptography", reason="cryptography is not installed: pip install -e '.[encryption]'"
)

from recipes.encryption import (  # noqa: E402
    EncryptionCodec,
    MalformedKeys,
    Tampered,
    encrypting,
)

RECIPE = ROOT / "recipes" / "encryption.py"
A = base64.b64encode(b"a" * 32).decode()
B = base64.b64encode(b"b" * 32).decode()
OLD, NEW, ROTATED = f"old-key:{A}", f"new-key:{B}", f"new-key:{B}, old-key:{A}"


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


# --- The codec ------------------------------------------------------------------------------------


def in_clear(text: str = "a text of the customer") -> Payload:
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


async def test_a_payload_that_was_changed_is_refused() -> None:
    payload = await encrypted()
    for place in range(len(payload.data)):
        changed = Payload()
        changed.CopyFrom(payload)
        changed.data = bytes(byte ^ (n == place) for n, byte in enumerate(payload.data))
        with pytest.raises(Tampered):
            await decoded(changed)


async def test_a_payload_is_bound_to_the_name_of_its_key() -> None:
    renamed = await encrypted()
    renamed.metadata["encryption-key-id"] = b"other"
    with pytest.raises(Tampered):
        await decoded(renamed, f"{OLD},other:{A}")


@pytest.mark.parametrize(
    ("keys", "entry"),
    [
        ("", 1),
        (f"old key:{A}", 1),
        (f"old-key:{A[:-4]}", 1),
        (f"old-key:!{A[1:]}", 1),
        (f"{OLD},", 2),
        (f"{OLD},{NEW},old-key:{B}", 3),
    ],
)
def test_malformed_keys_are_refused_and_not_shown(keys: str, entry: int) -> None:
    with pytest.raises(MalformedKeys, match=f"PAYLOAD_KEYS: entry {entry} ") as refused:
        encrypting(keys)
    assert A[:8] not in str(refused.value) and B[:8] not in str(refused.value)


async def test_the_recipe_shows_it() -> None:
    code, out, err = await ended(RECIPE)
    assert (code, err) == (0, "")
    assert "in which 4 of 4 texts" in out and "in which 0 of 4 texts" in out

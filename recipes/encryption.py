"""Encrypt what Event History holds: a payload codec with key rotation, for clients and Workers.

    pip install -e '.[encryption]'
    python recipes/encryption.py      two cases on a dev server of its own; seconds, and no keys

Copy the file down to "Seen to work", without the imports of this project. Every client gets the
converter. A Worker takes the one of its client:

    export PAYLOAD_KEYS="2026-02:$(openssl rand -base64 32)"
    Client.connect(..., data_converter=encrypting(os.environ.get("PAYLOAD_KEYS", "")))

The first key encrypts, and every key decrypts. So a rotation takes three deploys: add the new entry
at the end, behind a comma; when every process has it, move it to the front; remove the old entry
when the last history under it is past its retention. Open cases go on meanwhile. On a Worker that
lacks a key, a case stands still (UnknownKey) until a Worker has the key, but an Activity whose
arguments cannot be read uses up attempts. One key is good for 2**32 payloads.

Some things remain in clear, so keep customers out of them: Workflow ID (here it names the order),
Run ID, Task Queue, identities, names of Workflows, Activities, Signals, Queries and memo fields,
search attributes, types of failures, reasons of a cancel or terminate, all times and sizes.
Payloads in clear are accepted, so that older cases go on. Nothing ties a payload to its place: a
person who can write to the server's database can replace one payload by another. The Web UI shows
ciphertext unless it is given a codec server, which is an HTTP endpoint around `decode`.
"""

import base64
import os
import re
import sys
import uuid
from collections.abc import Sequence

from temporalio import converter
from temporalio.api.common.v1 import Payload
from temporalio.client import WorkflowHistory
from temporalio.converter import DataConverter
from temporalio.worker import Replayer

import harness
import run_demo
from refund_agent import (
    Answer,
    Question,
    RefundActivities,
    RefundAgent,
    RefundRequest,
    build_worker,
    start_case,
)

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ModuleNotFoundError:
    sys.exit("cryptography is not installed. Install it with: pip install -e '.[encryption]'")

ENCODING, KEY_ID = b"binary/encrypted", "encryption-key-id"
KEY_BYTES, NONCE_BYTES = 32, 12  # AES-256, and the nonce that AES-GCM is made for
ENTRY = re.compile(r"([A-Za-z0-9_.-]{1,64}):([A-Za-z0-9+/]{43}=)")  # 32 bytes of base64


# Not ApplicationErrors: a final one, raised while a Worker reads a task, would fail the whole case.
class MalformedKeys(Exception): ...


class UnknownKey(Exception): ...


class Tampered(Exception): ...


class EncryptionCodec(converter.PayloadCodec):
    """Encrypts a payload whole, metadata and all; the id of the key is in clear, authenticated."""

    def __init__(self, keys: str) -> None:
        self._keys: dict[bytes, AESGCM] = {}
        for number, entry in enumerate(keys.split(","), 1):
            found = ENTRY.fullmatch(entry.strip())
            if found is None or found[1].encode() in self._keys:  # not shown: it may be most of one
                raise MalformedKeys(
                    f"PAYLOAD_KEYS: entry {number} is not a new ID:BASE64 of {KEY_BYTES} bytes"
                )
            self._keys[found[1].encode()] = AESGCM(base64.b64decode(found[2]))

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        (id, key), *_ = self._keys.items()
        nonces = [os.urandom(NONCE_BYTES) for _ in payloads]
        return [
            Payload(
                metadata={"encoding": ENCODING, KEY_ID: id},
                data=nonce + key.encrypt(nonce, payload.SerializeToString(), ENCODING + id),
            )
            for nonce, payload in zip(nonces, payloads, strict=True)
        ]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [self._decrypted(payload) for payload in payloads]

    def _decrypted(self, payload: Payload) -> Payload:
        if payload.metadata.get("encoding") != ENCODING:
            return payload
        id = payload.metadata.get(KEY_ID, b"")
        if id not in self._keys:
            raise UnknownKey(f"PAYLOAD_KEYS has no key {id.decode(errors='replace')[:64]!r}")
        nonce, text = payload.data[:NONCE_BYTES], payload.data[NONCE_BYTES:]
        try:
            return Payload.FromString(self._keys[id].decrypt(nonce, text, ENCODING + id))
        except (InvalidTag, ValueError):
            raise Tampered("a payload was changed, or its key's id has another key here") from None


def encrypting(keys: str) -> DataConverter:
    """Also moves the messages and stack traces of failures to where a codec reaches them."""
    return DataConverter(
        payload_codec=EncryptionCodec(keys),
        failure_converter_class=converter.DefaultFailureConverterWithEncodedAttributes,
    )


# --- Seen to work --------------------------------------------------------------------------------

ORDER = run_demo.ShopOrder("4711", "", "silver teapot", 80_00, 200_00, "ada-lovelace")
REQUEST = RefundRequest(ORDER.order_id, ORDER.customer_id, "Please refund my teapot.")
ANSWER = "Yes, and the lid is cracked."
SECRETS = (REQUEST.message, ANSWER, ORDER.customer_id, ORDER.item)
BASE64 = re.compile('"((?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?)"')


class World(run_demo.Durable):
    async def ask(self, question: Question) -> Answer:
        return Answer(question.id, ANSWER)


async def play(server: harness.DevServer, *converters: DataConverter) -> WorkflowHistory:
    """One case, on a Worker for each converter; all but the last go when it waits for an answer."""
    world, queue = World(ORDER.order_id), f"encryption-{uuid.uuid4()}"
    world.add(ORDER)
    steps = RefundActivities(stripe=world.stripe, shop=world.shop, decide=world.decide)
    for each in converters:
        client = await server.client(data_converter=each, plugins=[run_demo.DemoWorker("demo")])
        async with build_worker(client, queue, steps, world.xmemory):
            case = await start_case(client, REQUEST, task_queue=queue, case_id=queue)
            if each is converters[-1]:
                await world.attend(case)
                break
            async for event in case.fetch_history_events(wait_new_event=True):
                if run_demo.waits_for_a_person(event):
                    break
    return await case.fetch_history()


def readable(exported: str) -> str:
    """What an exported history shows without a key; base64 hides nothing."""
    inside = [base64.b64decode(text).decode("latin-1") for text in BASE64.findall(exported)]
    return "\n".join([exported, *inside])


async def main() -> int:
    old, new = (
        f"{id}:{base64.b64encode(os.urandom(KEY_BYTES)).decode()}" for id in ("old-key", "new-key")
    )
    rotated = encrypting(f"{new},{old}")
    async with harness.dev_server(*harness.FAST_TIMERS) as server:
        shown = await play(server, DataConverter.default)
        hidden = await play(server, encrypting(old), rotated)
    await Replayer(workflows=[RefundAgent], data_converter=rotated).replay_workflow(hidden)
    counts = []
    for name, history in (("in clear", shown), ("encrypted", hidden)):
        exported = history.to_json()
        text = readable(exported)
        counts.append(sum(secret in text for secret in SECRETS))
        print(
            f"{name}: {len(exported):,} bytes of Event History, in which {counts[-1]} of "
            f"{len(SECRETS)} texts of the customer can be read"
        )
    under = [text.count(id) for id in ("old-key", "new-key")]
    print(
        f"the key was rotated while the case was open: {under[0]} payloads under the old one, "
        f"{under[1]} under the new one; the history replays"
    )
    return 0 if counts == [len(SECRETS), 0] and all(under) else 1


if __name__ == "__main__":
    harness.run(main())

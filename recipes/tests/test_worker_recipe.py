"""The Worker to deploy: two of them, of which one is killed and the other is told to stop."""

import asyncio
import json
import os
import re
import signal
import socket
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import pytest_asyncio
from http_face import Answer, HttpFace, Request, serving
from temporalio.api.common.v1 import Payload
from temporalio.common import RawValue
from temporalio.runtime import Runtime

import harness
import refund_agent
import run_demo
from desk import Desk, Quiet, program
from harness import Child, DevServer
from refund_agent import (
    Case,
    Known,
    Question,
    RefundAgent,
    RefundRequest,
    RefundResult,
    start_case,
)

for library in ("pythonjsonlogger", "opentelemetry.exporter.otlp.proto.http"):
    pytest.importorskip(library, reason=f"no {library}: pip install -e '.[worker]'")

from recipes import worker as recipe  # noqa: E402

SECONDS = 60
CANARY, KEY = "text-canary", "key-canary"


async def reply(question: Question) -> refund_agent.Answer:
    return refund_agent.Answer(question.id, f"It is broken. {CANARY}")


class Stumbling(Quiet):
    """Its decider fails once, with an error that quotes the customer."""

    async def decide(self, known: Known) -> object:
        if len(self.decisions) == 1:
            raise RuntimeError(f"cannot make sense of: {known.request.message}")
        return await super().decide(known)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def profile(folder: Path, address: str | None, rest: str = "tls.disabled = true") -> dict[str, str]:
    """The environment of a Worker that reads its connection from a profile of this file."""
    path = folder / f"{uuid.uuid4()}.toml"
    path.write_text(f'[profile.fleet]\naddress = "{address}"\napi_key = "{KEY}"\n{rest}\n')
    return {"TEMPORAL_CONFIG_FILE": str(path), "TEMPORAL_PROFILE": "fleet"}


@asynccontextmanager
async def started(
    world: Quiet,
    env: Mapping[str, str],
    metrics: str | None = None,
    build: str = "worker_wiring:worker",
) -> AsyncIterator[Child]:
    given = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "",
        "OTEL_BSP_SCHEDULE_DELAY": "300",
        "NO_PROXY": "127.0.0.1",
        **env,
    }
    job = ("the Worker", "worker_wiring:deployed", given, world.name, build)
    async with harness.child(*job, metrics, world=world) as child:
        yield child


def written(child: Child) -> str:
    child.output.seek(0)
    return str(child.output.read().decode())


def lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


async def seen(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(run_demo.POLL_SECONDS)


class Collector(HttpFace):
    """Of spans, by OTLP over HTTP. Their names are in clear."""

    async def answer(self, request: Request) -> Answer:
        return Answer(200, b"")


# --- Two Workers ---------------------------------------------------------------------------------


@dataclass
class Fleet:
    """Two Workers, their cases, and what became of them."""

    desk: Desk
    collector: Collector
    first: Child  # has the case until it is killed
    second: Child  # comes new to it
    result: RefundResult | None = None
    metrics: str = ""  # of the one that is left
    exit_code: object = None
    finished: bool = False  # the refund that was in flight when that was told to stop
    output: str = ""  # of both

    @property
    def case_id(self) -> str:
        return f"1-{self.desk.queue}"

    @property
    def exported(self) -> bytes:
        return b"".join(request.data for request in self.collector.requests)

    async def kill(self) -> None:
        """SIGKILL the one that has the case, with its refund in flight; the other one goes on."""
        case: Case = self.desk.client.get_workflow_handle_for(RefundAgent.run, self.case_id)
        await self.first.kill()
        self.desk.world.stripe.release()
        self.result = await asyncio.wait_for(case.result(), SECONDS)

    async def fail_a_task(self) -> None:
        """A Workflow that cannot even start, because of its input, which the reason quotes. The SDK
        logs that, and so does its core."""
        unknown, queue = Payload(metadata={"encoding": CANARY.encode()}), self.desk.queue
        broken = await self.desk.client.start_workflow(
            "RefundAgent", RawValue(unknown), id=f"no-{queue}", task_queue=queue
        )
        async for event in broken.fetch_history_events(wait_new_event=True):
            if event.HasField("workflow_task_failed_event_attributes"):
                break
        await broken.terminate()

    async def stop(self) -> None:
        """SIGTERM to the other one, while another refund is in flight."""
        stripe, left = self.desk.world.stripe, self.second
        async with refunding(self.desk, f"2-{self.desk.queue}", "1239", "fumi", left) as case:
            os.kill(left.pid, signal.SIGTERM)
            await says(left, "Beginning worker shutdown")
            stripe.release()
            self.exit_code = await left.process.wait()
        recorded = await run_demo.recorded_of(case)
        self.finished = "issue_refund" in recorded.finished
        await case.terminate()


async def says(child: Child, text: str) -> None:
    await asyncio.wait_for(seen(lambda: text in written(child)), SECONDS)


@asynccontextmanager
async def refunding(
    desk: Desk, case_id: str, order_id: str, customer_id: str, child: Child
) -> AsyncIterator[Case]:
    """A case that has come to its refund: Stripe is asked, and does not answer."""
    held = desk.world.stripe.hold_next_create("before")
    case = await start_case(
        desk.client,
        RefundRequest(order_id, customer_id, CANARY),
        case_id=case_id,
        task_queue=desk.queue,
    )
    async with desk.world.attending(case):
        await child.until(held, SECONDS, "the refund")
        yield case


@pytest_asyncio.fixture(scope="module")
async def fleet(server: DevServer, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    desk, port = Desk(await server.client()), free_port()
    desk.world = world = Stumbling("1234")
    world.replies, desk.queue = reply, world.name
    async with serving(Collector()) as collector:
        folder, address = tmp_path_factory.mktemp("fleet"), await server.address()
        environment = profile(folder, address) | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        }
        async with (
            started(world, environment, f"127.0.0.1:{free_port()}") as first,
            refunding(desk, f"1-{desk.queue}", "1234", "ada", first),
            started(world, environment, f"127.0.0.1:{port}") as second,
        ):
            await says(second, "works for namespace")
            fleet = Fleet(desk, collector, first, second)
            await seen(lambda: b"StartActivity:issue_refund" in fleet.exported)
            await fleet.kill()
            await asyncio.wait_for(fleet.fail_a_task(), SECONDS)
            url = f"http://127.0.0.1:{port}/metrics"
            fleet.metrics = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
            await fleet.stop()
            fleet.output = written(first) + written(second)
    return fleet


async def test_a_worker_is_killed_and_the_other_one_refunds_once(fleet: Fleet) -> None:
    assert fleet.result is not None and fleet.result.remembered
    assert fleet.result.outcome == "refund succeeded"
    assert fleet.desk.world.count()["refunds"] == 1


async def test_the_other_one_is_told_to_stop_and_finishes_its_refund_first(fleet: Fleet) -> None:
    assert fleet.finished and fleet.exit_code == 0
    assert fleet.output.count("drained and stopped") == 1


async def test_every_log_line_is_json_and_has_the_case_if_there_is_one(fleet: Fleet) -> None:
    logged = lines(fleet.output)
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in logged)
    failed = {
        line["temporal_activity"]["activity_type"]: line
        for line in logged
        if line["message"] == "Completing activity as failed"
    }["agent_decide_next_step"]
    assert failed["temporal_activity"]["workflow_id"] == fleet.case_id
    assert re.match(r"CallFailed at .* from RuntimeError at .*harness\.py:\d+", failed["error"])
    core = {line["run_id"] for line in logged if line["message"] == "Failing workflow task"}
    assert len(core) == 1


async def test_no_customer_text_and_no_key_leaves_the_process(fleet: Fleet) -> None:
    for secret in (CANARY, KEY):
        assert secret not in fleet.output + fleet.metrics and secret.encode() not in fleet.exported


async def test_each_step_is_one_span_although_another_worker_replayed_it(fleet: Fleet) -> None:
    exported = fleet.exported
    assert exported.count(b"StartActivity:lookup_order") == 2  # one in each of the two cases
    assert exported.count(b"RunActivity:issue_refund") > 1
    assert all(f":{worker.pid}:dev".encode() in exported for worker in (fleet.first, fleet.second))


# --- The end of a Worker -------------------------------------------------------------------------


async def test_it_stops_from_its_first_moment() -> None:
    async with program(recipe.__file__) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        await seen(lambda: "temporal" in maps.read_text())  # it is importing the SDK
        process.terminate()
        _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")  # as process 1 it would have no default handler


async def test_a_collector_that_does_not_answer_does_not_delay_the_exit(
    server: DevServer, tmp_path: Path
) -> None:
    desk = Desk(await server.client())
    desk.queue = desk.world.name
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = profile(tmp_path, await server.address()) | {"OTEL_EXPORTER_OTLP_ENDPOINT": url}
        async with started(desk.world, env) as worker:
            async with refunding(desk, f"1-{desk.queue}", "1234", "ada", worker):
                os.kill(worker.pid, signal.SIGTERM)
                desk.world.stripe.release()
                assert await worker.process.wait() == 0
            assert "the collector does not answer" in written(worker)
    assert desk.world.count()["refunds"] == 1


async def test_a_namespace_that_is_deleted_ends_it_with_its_status(
    server: DevServer, tmp_path: Path
) -> None:
    name, address = f"gone-{uuid.uuid4()}", await server.address()
    create = "operator", "namespace", "create", "-n", name, "--address", address
    ran = await asyncio.create_subprocess_exec(str(harness.temporal_binary()), *create, stdout=-3)
    assert await ran.wait() == 0
    env = profile(tmp_path, address, f'tls.disabled = true\nnamespace = "{name}"')
    async with started(Quiet("1234"), env, build="worker_wiring:orphan") as worker:
        code = await asyncio.wait_for(worker.process.wait(), SECONDS)
        last = lines(written(worker))[-1]["message"]
    assert code == 2 and last == f"{address} answers NOT_FOUND; {CHECK}"


# --- What does not start -------------------------------------------------------------------------

CHECK = "check the namespace and the API key"


class Left(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int, why: str) -> NoReturn:
        raise Left(f"{code} {why}")

    monkeypatch.setattr(recipe, "leave", leave)


async def refusal(env: Mapping[str, str]) -> str:
    """How it leaves that finds this environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        with pytest.raises(Left) as left:
            await recipe.connect("a Worker", Runtime.default(), [])
    assert KEY not in str(left.value) and "\n" not in str(left.value)
    return str(left.value)


# --- Tracing, if it is wanted --------------------------------------------------------------------


@pytest.mark.usefixtures("leaving")
async def test_a_configuration_that_cannot_work_is_named(server: DevServer, tmp_path: Path) -> None:
    unknown = profile(tmp_path, "x:1") | {"TEMPORAL_PROFILE": "fleeet"}
    no_file = profile(tmp_path, "x:1", 'tls.client_cert_path = "/no/cert"')
    foreign = profile(tmp_path, await server.address(), 'tls.disabled = true\nnamespace = "x"')
    nobody = profile(tmp_path, f"127.0.0.1:{free_port()}")
    assert (await refusal(unknown)).endswith("cannot be used: Profile 'fleeet' not found")
    assert (await refusal(no_file)).startswith("2 ") and "/no/cert" in await refusal(no_file)
    for address in ("no address", "localhost", "http://localhost:7233", "localhost:"):
        refused = await refusal(profile(tmp_path, address))
        assert refused == f"2 {address} is no address of a Temporal server; give HOST:PORT"
    assert await refusal(foreign) == f"2 {await server.address()} answers NOT_FOUND; {CHECK}"
    assert (await refusal(nobody)).startswith("1 no connection to 127.0.0.1:")  # it may come
    with pytest.raises(Left, match="^2 --build takes MODULE:FUNCTION, .* no nowhere:worker: "):
        recipe.named("nowhere:worker")
    with pytest.raises(Left, match="^2 --metrics nowhere: "):
        recipe.observed("nowhere")

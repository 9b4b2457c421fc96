"""The Worker to deploy: two of them, of which one is killed and the other is told to stop."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import urllib.request
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import NoReturn

import pytest
import pytest_asyncio
from otlp_http import Collector, collecting
from temporalio import workflow
from temporalio.api.common.v1 import Payload
from temporalio.common import RawValue
from temporalio.runtime import Runtime
from temporalio.worker import Worker

import harness
import run_demo
from desk import Desk, Quiet
from harness import Child, DevServer
from recipes import worker as recipe
from refund_agent import (
    Answer,
    Case,
    Known,
    Question,
    RefundAgent,
    RefundRequest,
    RefundResult,
    start_case,
)

SECONDS = 60
CANARY, KEY = "text-canary", "key-canary"
EXPORTER = "opentelemetry-exporter-otlp-proto-http"
TRACES = any(found.name == EXPORTER for found in distributions())
needs_tracing = pytest.mark.skipif(
    not TRACES, reason="OpenTelemetry is not installed: pip install -e '.[worker]'"
)


@workflow.defn
class Identity:
    @workflow.run
    async def run(self) -> int:
        return id(Identity)


async def reply(question: Question) -> Answer:
    return Answer(question.id, f"It is broken. {CANARY}")


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
    world: Quiet, env: Mapping[str, str], metrics: str | None = None
) -> AsyncIterator[Child]:
    given = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "",
        "OTEL_BSP_SCHEDULE_DELAY": "300",
        "NO_PROXY": "127.0.0.1",
        **env,
    }
    job = ("the Worker", "worker_wiring:deployed", given, world.name, "worker_wiring:worker")
    async with harness.child(*job, metrics, world=world) as child:
        yield child


def written(child: Child) -> str:
    child.output.seek(0)
    return str(child.output.read().decode())


def lines(output: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in output.splitlines()]


async def seen(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(run_demo.POLL_SECONDS)


# --- Two Workers ---------------------------------------------------------------------------------


@dataclass
class Fleet:
    """Two Workers, their cases, and what became of them."""

    desk: Desk
    spans: Collector
    first: Child  # has the case until it is killed
    second: Child  # comes new to it
    result: RefundResult | None = None
    in_hand: str = ""  # the identity of who had the refund in hand, before the kill
    in_history: set[str] = field(default_factory=set)  # identities
    scheduled: Counter[str] = field(default_factory=Counter)  # Activities of the first case
    metrics: str = ""  # of the one that is left
    exit_code: object = None
    finished: bool = False  # the refund that was in flight when that was told to stop
    output: str = ""  # of both

    @property
    def case_id(self) -> str:
        return f"1-{self.desk.queue}"

    async def kill(self) -> None:
        """SIGKILL the one that has the case, with its refund in flight; the other one goes on."""
        case: Case = self.desk.client.get_workflow_handle_for(RefundAgent.run, self.case_id)
        (refund,) = (await case.describe()).raw_description.pending_activities
        self.in_hand = refund.last_worker_identity
        await self.first.kill()
        self.desk.world.stripe.release()
        self.result = await asyncio.wait_for(case.result(), SECONDS)
        for event in (await case.fetch_history()).events:
            self.in_history.add(event.workflow_task_started_event_attributes.identity)
            if event.HasField("activity_task_scheduled_event_attributes"):
                name = event.activity_task_scheduled_event_attributes.activity_type.name
                self.scheduled[name] += 1

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
    async with collecting() as spans:
        folder, address = tmp_path_factory.mktemp("fleet"), await server.address()
        environment = profile(folder, address) | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": spans.url if TRACES else "",
        }
        async with (
            started(world, environment, f"127.0.0.1:{free_port()}") as first,
            refunding(desk, f"1-{desk.queue}", "1234", "ada", first),
            started(world, environment, f"127.0.0.1:{port}") as second,
        ):
            await says(second, "works for namespace")
            if TRACES:
                await seen(lambda: "StartActivity:issue_refund" in spans.names())
            fleet = Fleet(desk, spans, first, second)
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


async def test_a_worker_that_is_told_to_stop_drains_and_exits_with_zero(fleet: Fleet) -> None:
    assert fleet.finished and fleet.exit_code == 0
    assert fleet.output.count("drained and stopped") == 1


async def test_history_names_the_workers(fleet: Fleet) -> None:
    here, release = socket.gethostname(), "dev"
    first, second = (
        f"refund-agent@{here}:{worker.pid}:{release}" for worker in (fleet.first, fleet.second)
    )
    assert fleet.in_hand in (first, second)  # a busy machine may have lost its heartbeats before
    assert fleet.in_history == {"", first, second}


async def test_every_log_line_is_json_and_has_the_case_if_there_is_one(fleet: Fleet) -> None:
    logged = lines(fleet.output)
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in logged)
    failed = [line for line in logged if line["message"] == "Completing activity as failed"]
    assert fleet.case_id in [line["workflow_id"] for line in failed]
    broken = {line["run_id"] for line in logged if "Failed activation" in line["message"]}
    core = {line["run_id"] for line in logged if line["message"] == "Failing workflow task"}
    assert len(broken) == 1 and core == broken


async def test_an_error_is_logged_with_its_classes_and_places(fleet: Fleet) -> None:
    decisions = "agent_decide_next_step"
    (failed,) = [each for each in lines(fleet.output) if each.get("activity_type") == decisions]
    assert failed["error"] == "CallFailed from RuntimeError"
    assert re.search(r"harness\.py:\d+ __call__$", failed["at"])


async def test_no_customer_text_and_no_key_leaves_the_process(fleet: Fleet) -> None:
    exported = b"".join(fleet.spans.received)
    for secret in (CANARY, KEY):
        assert secret not in fleet.output + fleet.metrics and secret.encode() not in exported


async def test_metrics_are_served(fleet: Fleet) -> None:
    assert re.search(r'^temporal_\w+{.*activity_type="issue_refund".*} \d+$', fleet.metrics, re.M)
    assert f'task_queue="{fleet.desk.queue}"' in fleet.metrics


@needs_tracing
async def test_a_case_is_one_trace_of_both_workers_and_replay_adds_no_span(fleet: Fleet) -> None:
    spans = [span for span in fleet.spans.spans() if span.case_id == fleet.case_id]
    trace = [span for span in spans if not span.name.startswith("Handle")]  # Signals and Queries
    began = Counter(span.name for span in trace if not span.name.startswith("RunActivity"))
    expected = {f"StartActivity:{name}": count for name, count in fleet.scheduled.items()}
    assert began == expected | {"RunWorkflow:RefundAgent": 1}
    assert len({span.trace_id for span in trace}) == 1
    assert len({span.identity for span in trace}) == 2


@needs_tracing
async def test_a_worker_that_drains_exports_its_last_spans(fleet: Fleet) -> None:
    assert "RunActivity:issue_refund" in fleet.spans.names(f"2-{fleet.desk.queue}")


async def test_without_a_build_it_works_around_stand_ins(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    async with recipe.stand_ins(desk.client, desk.queue):
        case = await desk.start()
        async with desk.world.attending(case):
            assert (await case.result()).outcome == "refund succeeded"
    assert "STAND-INS" in caplog.text


# --- What does not start -------------------------------------------------------------------------


async def ended(env: Mapping[str, str], metrics: str | None = None) -> tuple[object, str]:
    """The exit code of a Worker that cannot start, and the one thing it says."""
    async with started(Quiet("1234"), env, metrics) as child:
        code = await asyncio.wait_for(child.process.wait(), SECONDS)
        (line,) = lines(written(child))
        return code, line["message"]


async def test_what_cannot_start_says_why_in_one_line_and_ends(tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = f"127.0.0.1:{taken.getsockname()[1]}"
        metrics, server = await asyncio.gather(ended({}, port), ended(profile(tmp_path, nobody)))
    assert metrics[0] == 2 and metrics[1].startswith(f"--metrics {port}: ")
    assert server[0] == 1 and server[1].startswith(f"no connection to {nobody}; check")


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


@pytest.mark.usefixtures("leaving")
async def test_a_configuration_that_cannot_work_is_named(tmp_path: Path) -> None:
    unknown = profile(tmp_path, "x:1") | {"TEMPORAL_PROFILE": "fleeet"}
    broken = profile(tmp_path, "x:1", f"again = {KEY}")
    no_file = profile(tmp_path, "x:1", 'tls.client_cert_path = "/no/cert"')
    assert (await refusal(unknown)).endswith("cannot be used: Profile 'fleeet' not found")
    assert (await refusal(broken)).startswith("2 the Temporal configuration cannot be used: ")
    assert "/no/cert" in await refusal(no_file)
    assert (await refusal(profile(tmp_path, "no address"))).startswith("2 no address is no ")
    for build in ("nowhere:worker", "worker_wiring:nothing", ""):
        with pytest.raises(Left, match=f"^2 --build takes MODULE:FUNCTION, .* no {build}: "):
            recipe.named(build)


@pytest.mark.usefixtures("leaving")
async def test_the_namespace_of_the_profile_is_asked_for(server: DevServer, tmp_path: Path) -> None:
    rest, address = 'tls.disabled = true\nnamespace = "another"', await server.address()
    refused = await refusal(profile(tmp_path, address, rest))
    assert refused == f"1 {address} answers NOT_FOUND; check the namespace and the API key"


@pytest.mark.usefixtures("leaving")
async def test_a_profile_with_an_api_key_turns_tls_on(tmp_path: Path) -> None:
    greetings = list[bytes]()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greetings.append(await reader.read(2))
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as listening:
        address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        assert (await refusal(profile(tmp_path, address, rest=""))).startswith("1 no connection")
    assert set(greetings) == {b"\x16\x03"}  # how a TLS handshake begins


# --- Tracing, if it is wanted --------------------------------------------------------------------


@pytest.mark.usefixtures("leaving")
async def test_nothing_is_traced_if_no_collector_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # any import of it fails
    with recipe.traced("a Worker") as plugins:
        assert plugins == []


@pytest.mark.usefixtures("leaving")
async def test_tracing_without_opentelemetry_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(Left, match="2 tracing needs opentelemetry: pip install -e"):
        recipe.traced("a Worker").__enter__()


async def test_the_file_of_a_workflow_is_imported_once(
    server: DevServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, ours = str(uuid.uuid4()), id(Identity)
    await server.client()
    monkeypatch.setenv("TEMPORAL_ADDRESS", await server.address())
    client = await recipe.connect("a Worker", Runtime.default(), [])
    async with Worker(client, task_queue=queue, workflows=[Identity]):
        assert await client.execute_workflow(Identity.run, id=queue, task_queue=queue) == ours

"""The Worker process to deploy. With --build, two of them are a fleet: each goes on with any case.

    python recipes/worker.py                               around stand-ins, and it says so
    python recipes/worker.py --build mine:worker --metrics 0.0.0.0:9464

`mine.worker` does what `stand_ins` does below. Put `mine` where Python finds it (PYTHONPATH=.). It
is also the place for a codec or a plugin of the Client: hand `build_worker` a
`Client(**client.config() | {"data_converter": ...})`. Without --build, start only one Worker,
because each process has stand-ins of its own.

Install: `pip install -e '.[worker]'`.
Connection: TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, TEMPORAL_API_KEY (it turns TLS on) and the other
variables that the SDK reads; or a profile, by TEMPORAL_PROFILE and TEMPORAL_CONFIG_FILE.
Logs: one JSON object a line, on stderr. An error is logged with its classes and its place, without
its text, which may quote a customer. There is no DEBUG, because the SDK's would log whole payloads.
Metrics: for Prometheus, at /metrics. Two Workers on one host need a port each; 0 tells nobody.
Tracing: OTEL_EXPORTER_OTLP_ENDPOINT (OTLP over HTTP) turns it on. The other OTEL_ variables are
read as well. A case is one trace, whichever Workers carried it. A process that is killed loses the
spans it had not exported. The SDK calls this plugin experimental.
Identity: refund-agent@HOST:PID:RELEASE. RELEASE is an environment variable.
Stopping: after SIGTERM or Ctrl-C the Worker drains for up to ten seconds, then exports its spans
for up to three. Let the supervisor wait 20 seconds (`docker stop` waits 10). Exit codes: 0 stopped;
1 start me again, after a pause; 2 change the configuration first.
"""

import os
import signal

if __name__ == "__main__":
    # The imports below take a second. Process 1 of a container ignores a signal without a handler.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))  # nothing was taken on yet

import argparse
import asyncio
import logging
import pkgutil
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from temporalio import activity, runtime, workflow
from temporalio.client import Client, Plugin
from temporalio.envconfig import ClientConfig
from temporalio.service import RPCError
from temporalio.worker import Worker

from refund_agent import RefundActivities, build_worker

try:
    from pythonjsonlogger.core import RESERVED_ATTRS
    from pythonjsonlogger.json import JsonFormatter
except ModuleNotFoundError:
    sys.exit("python-json-logger is not installed. Install it with: pip install -e '.[worker]'")

CONNECT_SECONDS = 10.0  # a server that takes longer is as good as none
EXPORT_SECONDS = 3.0  # for the last spans; a collector that does not answer delays the exit no more
CORE_IDS = ("workflow_id", "run_id")  # of what the SDK's core logs; other fields quote failures
# What a person must change before a restart helps. Every other status may pass.
LASTING = {"NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ARGUMENT"}
log = logging.getLogger("refund-agent")


def stand_ins(client: Client, task_queue: str) -> Worker:
    """Yours, for --build, does the same with your Stripe, shop, decider and memory."""
    import run_demo  # of the demo, so only here

    log.warning("STAND-INS: no money moves and nothing outlives this process; give it --build")
    world = run_demo.Durable("1234")
    activities = RefundActivities(world.stripe, world.shop, world.decide)
    return build_worker(client, task_queue, activities, world.xmemory)


class JsonLines(JsonFormatter):
    """An error has its classes and its places, and not its text."""

    def __init__(self) -> None:
        super().__init__(
            ["levelname", "name", "message"],
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "error"},
            reserved_attrs=[*RESERVED_ATTRS, "temporal_log"],
            timestamp="time",
        )

    def add_fields(self, line: dict[str, Any], record: logging.LogRecord, more: Any) -> None:
        super().add_fields(line, record, more)
        line["message"] = record.getMessage().partition("\n")[0]  # what follows is whole objects
        core = getattr(getattr(record, "temporal_log", None), "fields", {})
        line |= {name: core[name] for name in CORE_IDS if name in core}

    def formatException(self, raised: Any) -> str:
        found, error = list[str](), raised[1]
        while error:  # back to the first one; `from None` only hides that from a traceback
            frames = traceback.extract_tb(error.__traceback__)
            places = ", ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)
            found.append(f"{getattr(error, 'type', None) or type(error).__name__} at {places}")
            error = error.__cause__ or error.__context__
        return " from ".join(found)


def leave(code: int, why: str) -> NoReturn:
    """Python's own way out can crash while the SDK's threads wind down."""
    log.log(logging.ERROR if code else logging.INFO, why)
    os._exit(code)


def observed(metrics: str | None) -> runtime.Runtime:
    """The log, also of the SDK's core and of Python's warnings, and the metrics."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(True)
    for name in (log.name, "temporalio"):
        logging.getLogger(name).setLevel(logging.INFO)
    activity.logger.activity_info_on_message = workflow.logger.workflow_info_on_message = False
    forwarded = runtime.LogForwardingConfig(
        logging.getLogger("temporalio.core"),
        append_target_to_name=False,
        prepend_target_on_message=False,
        append_log_fields_to_message=False,
    )
    try:
        return runtime.Runtime(
            telemetry=runtime.TelemetryConfig(
                logging=runtime.LoggingConfig(runtime.LoggingConfig.default.filter, forwarded),
                metrics=runtime.PrometheusConfig(metrics) if metrics else None,
            )
        )
    except ValueError as error:
        leave(2, f"--metrics {metrics}: {error}; give the IP:PORT of a free port")


@contextmanager
def traced(identity: str) -> Iterator[list[Plugin]]:
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        yield []
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from temporalio.contrib.opentelemetry import OpenTelemetryPlugin, create_tracer_provider
    except ImportError as missing:
        leave(2, f"tracing needs {missing.name}: pip install -e '.[worker]'")
    names = {"service.name": os.environ.get("OTEL_SERVICE_NAME", log.name)}
    resource = Resource.create({**names, "service.instance.id": identity})
    provider = create_tracer_provider(resource=resource)
    try:
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except ValueError as error:
        leave(2, f"an OTEL_ variable cannot be used: {error}")
    trace.set_tracer_provider(provider)
    try:
        yield [OpenTelemetryPlugin(add_temporal_spans=True)]
    finally:
        exporting = threading.Thread(target=provider.shutdown, daemon=True)
        exporting.start()
        exporting.join(EXPORT_SECONDS)
        if exporting.is_alive():
            log.warning("the collector does not answer, so the last spans are lost")


async def connect(identity: str, telemetry: runtime.Runtime, plugins: list[Plugin]) -> Client:
    try:
        config = ClientConfig.load_client_connect_config()
    except (RuntimeError, OSError) as error:  # only its first line: the others may quote a key
        leave(2, f"the Temporal configuration cannot be used: {str(error).splitlines()[0]}")
    where = config.setdefault("target_host", "localhost:7233")
    if not re.fullmatch(r"[^\s/]+:\d{1,5}", where):
        leave(2, f"{where} is no address of a Temporal server; give HOST:PORT")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            client = await Client.connect(
                **config, identity=identity, runtime=telemetry, plugins=plugins
            )
            await client.count_workflows()  # or a wrong namespace or key shows only later
    except ValueError as error:
        leave(2, f"{where} cannot be connected to: {error}")
    except RPCError as error:
        ended_by(error.status.name, where)
    except (RuntimeError, TimeoutError) as error:
        leave(1, f"no connection to {where}; check the address and TLS: {error or 'no answer'}")
    log.info(f"{identity} works for namespace {client.namespace} at {where}")
    return client


def ended_by(status: str, where: str) -> NoReturn:
    """`status` is what the server answers, by its gRPC name."""
    code = 2 if status in LASTING else 1
    leave(code, f"{where} answers {status}; check the namespace and the API key")


def status_of(error: Exception) -> str:
    """The SDK gives the status that ended a Worker only in a text, as `Status { code: NotFound`."""
    text = "".join(traceback.format_exception(error))
    found = re.search(r"Status \{ code: ([A-Z]\w+)", text)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", found[1]).upper() if found else ""


def named(build: str) -> Callable[[Client, str], Worker]:
    try:
        found: Callable[[Client, str], Worker] = pkgutil.resolve_name(build)
        return found
    except (ImportError, AttributeError, ValueError) as error:
        leave(2, f"--build takes MODULE:FUNCTION, and there is no {build}: {error}")


async def run_until_stopped(worker: Worker) -> None:
    """Run a Worker until SIGTERM or Ctrl-C. It then takes no new work. The work in flight has the
    Worker's `graceful_shutdown_timeout` to finish; another Worker repeats the rest."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):  # on Windows
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with worker:
        await stopped.wait()


async def main(task_queue: str, build: str | None, metrics: str | None) -> None:
    telemetry, built = observed(metrics), stand_ins if build is None else named(build)
    place = f"{socket.gethostname()}:{os.getpid()}"
    identity = f"{log.name}@{place}:{os.environ.get('RELEASE', 'dev')}"
    with traced(identity) as plugins:
        client = await connect(identity, telemetry, plugins)
        try:
            worker = built(client, task_queue)
        except Exception:
            log.exception("%s built no Worker", build)
            leave(2, "change what builds the Worker, or its configuration")
        try:
            await run_until_stopped(worker)
        except RuntimeError as error:
            if status := status_of(error):
                ended_by(status, client.service_client.config.target_host)
            raise


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--build", metavar="MODULE:FUNCTION", help="(Client, task_queue) -> Worker")
    parser.add_argument("--metrics", metavar="IP:PORT", help="where to serve them; else nowhere")
    parser.add_argument("--task-queue", default="refunds")
    options = parser.parse_args()
    try:
        asyncio.run(main(**vars(options)))
    except BaseException:
        log.critical("the Worker failed", exc_info=True)
        os._exit(1)
    leave(0, "drained and stopped")

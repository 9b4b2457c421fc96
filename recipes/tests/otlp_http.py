"""A collector of spans: OTLP over HTTP, loopback only, everything is accepted."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

END_OF_HEAD = b"\r\n\r\n"


class Span(NamedTuple):
    name: str
    trace_id: bytes
    identity: str  # of the process it comes from
    case_id: str


class Collector:
    def __init__(self) -> None:
        self.url, self.received = "", list[bytes]()

    def spans(self) -> list[Span]:
        return [span for body in self.received for span in parsed(body)]

    def names(self, case_id: str = "") -> list[str]:
        return [span.name for span in self.spans() if case_id in ("", span.case_id)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):  # the exporter has left
            while True:
                head = (await reader.readuntil(END_OF_HEAD)).decode().lower()
                assert head.startswith("post /v1/traces ")
                length = head.partition("content-length: ")[2].partition("\r\n")[0]
                self.received.append(await reader.readexactly(int(length)))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    async with await asyncio.start_server(collector.serve, "127.0.0.1", 0) as server:
        collector.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield collector


def parsed(body: bytes) -> Iterator[Span]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for found in ExportTraceServiceRequest.FromString(body).resource_spans:
        source = values(found.resource.attributes)
        for span in (span for scope in found.scope_spans for span in scope.spans):
            case_id = values(span.attributes).get("temporalWorkflowID", "")
            yield Span(span.name, span.trace_id, source["service.instance.id"], case_id)


def values(attributes: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in attributes}

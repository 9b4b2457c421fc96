"""Long-term memory (xmemory) for Temporal Workflows. Copy this file; it needs nothing beside it.

Memory is what an agent carries from one run to the next. It is not where the work stands (that is
Event History) and not whether an effect happened (its owner knows). Three rules hold here:

* a free-text write is made at most once, because a second extraction may file the same fact under
  another key; a structured mutation carries its key and is retried;
* Temporal owns every retry and every wait, also the wait for a queued write;
* no key, no transport text and no content reaches the title of a failure or a summary.

In a Workflow: `memory = memory_for_workflow()`, then `await memory.read("...")` and so on.
For the Workers: `Client.connect(..., plugins=[XmemoryPlugin()])`; or, without the plugin,
`activities=MemoryActivities(instance).all()`, where `instance` is the client's
`AsyncXmemoryClient(...).instance("...")` or anything that has its four methods.

Texts, queries and results are Activity inputs and results, so Event History holds them in clear;
use a payload codec if it must not.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar, Unpack

from temporalio import activity, workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ApplicationErrorCategory,
    RetryState,
)
from temporalio.exceptions import is_cancelled_exception as is_cancelled
from temporalio.plugin import SimplePlugin
from temporalio.worker import Worker, WorkerConfig

# --- Constants, each with its reason -------------------------------------------------------------

HEARTBEAT_TIMEOUT = timedelta(seconds=10)  # how long the death of a Worker may go unnoticed
BEATS_PER_TIMEOUT = 4  # how often to beat; the Worker's `max_heartbeat_throttle_interval` decides
# how much of that reaches the server (by default one beat in 80% of the timeout)

READ_TIMEOUT = timedelta(seconds=120)  # a deep read of a large instance takes a minute or two
WRITE_TIMEOUT = timedelta(seconds=180)  # `write` returns when the extraction is applied
QUEUE_TIMEOUT = timedelta(seconds=30)  # `write_async` and `write_status` only touch the queue
CLIENT_MARGIN = timedelta(seconds=5)  # the client gives up first: its error says more
CLIENT_SHARE = 0.8  # of a timeout that is too short for that margin

RETRIED = RetryPolicy(maximum_interval=timedelta(seconds=30), maximum_attempts=10)
WAITING = RetryPolicy(maximum_interval=timedelta(seconds=30))  # the deadline ends it
ONCE = RetryPolicy(maximum_attempts=1)  # for free text: see the first rule

MAX_WAIT = timedelta(minutes=15)  # a long extraction takes minutes
FIRST_POLL, SLOWEST_POLL = timedelta(seconds=2), timedelta(seconds=30)
POLL_GROWTH = 1.5
STEEPEST = 20  # polls after which the growth is over; a longer exponent only overflows
SLOW_DOWN = timedelta(seconds=5)  # when xmemory asks for that and does not say for how long
MAX_RETRY_AFTER = timedelta(hours=1)  # a server may say a day; nobody looks for that long

MAX_BYTES = 150_000  # of one value; Temporal warns of half a MB, and its escaping triples some
EXCERPT = 60  # characters of content in a summary, if wanted; Temporal takes 200 bytes

# --- Heartbeats ----------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")
In = TypeVar("In")


def heartbeating(run: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Let an async Activity heartbeat for as long as it runs; outside an Activity, do nothing.

    With beats, the heartbeat timeout bounds how long a dead Worker goes unnoticed. Without them it
    is a trap: the attempt is given up but runs on, and the next one overlaps it.
    """

    @wraps(run)
    async def beating(*args: P.args, **kwargs: P.kwargs) -> R:
        timeout = activity.info().heartbeat_timeout if activity.in_activity() else None
        if timeout is None:
            return await run(*args, **kwargs)
        beat = asyncio.create_task(_beat(timeout.total_seconds() / BEATS_PER_TIMEOUT))
        try:
            return await run(*args, **kwargs)
        finally:
            beat.cancel()

    return beating


async def _beat(seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)  # first: most attempts are over by then, and a beat is a write
        activity.heartbeat()


# --- Errors: one table ---------------------------------------------------------------------------
# An error of the client is known by its attributes (`status`, `code`, `details`, `retry_after`), so
# this file needs no client library. Type strings are stable, to be matched in a RetryPolicy or an
# `except`. Messages are fixed, because Event History shows them in clear.


class Verdict(NamedTuple):
    type: str
    retryable: bool
    message: str
    delay: timedelta | None = None  # until the next try; None: as the RetryPolicy says


UNAVAILABLE = Verdict("XmemoryUnavailable", True, "xmemory did not answer")
SERVER_ERROR = Verdict("XmemoryServerError", True, "xmemory answered with a server error")
RATE_LIMITED = Verdict("XmemoryRateLimited", True, "xmemory asked to slow down", SLOW_DOWN)
DAILY_QUOTA = Verdict(
    "XmemoryDailyQuotaExceeded", True, "the daily xmemory quota is used up", MAX_RETRY_AFTER)
UNKNOWN = Verdict("XmemoryUnknown", True, "xmemory answered with a code unknown to this Worker")
MONTHLY_QUOTA = Verdict("XmemoryMonthlyQuotaExceeded", False, "the monthly quota is used up")
QUOTA = Verdict("XmemoryQuotaExceeded", False, "an xmemory quota is used up")
AUTH_FAILED = Verdict("XmemoryAuthFailed", False, "xmemory refused the API key")
NOT_FOUND = Verdict("XmemoryNotFound", False, "xmemory has no such instance")
BAD_REQUEST = Verdict("XmemoryBadRequest", False, "xmemory refused the request")
SCHEMA_REJECTED = Verdict("XmemorySchemaRejected", False, "xmemory refused the schema request")
WRITE_FAILED = Verdict("XmemoryWriteFailed", False, "xmemory could not apply the write")
WRITE_NOT_FOUND = Verdict("XmemoryWriteNotFound", False, "xmemory does not know this write")
WRITE_LATE = Verdict("XmemoryWriteTimeout", False, "the write did not finish within max_wait")
WRITE_PENDING = Verdict("XmemoryWritePending", True, "the write has not finished yet")
WRITE_UNCERTAIN = Verdict(
    "XmemoryWriteUncertain", False, "no answer: a job may be queued, so the text is not sent again")
CONFLICT = Verdict("XmemoryConflict", False, "the record exists, with other values")
TOO_LARGE = Verdict("XmemoryTooLarge", False, "too large for Event History; ask for less")

VERDICTS: dict[str | int, Verdict] = {  # by kind of quota, else by code, else by HTTP status
    "daily_quota_exceeded": DAILY_QUOTA, "monthly_quota_exceeded": MONTHLY_QUOTA,
    "QUOTA_EXCEEDED": QUOTA, "UNAUTHORIZED": AUTH_FAILED, "FORBIDDEN": AUTH_FAILED,
    "NOT_FOUND": NOT_FOUND, "VALIDATION_ERROR": BAD_REQUEST, "INVALID_INPUT": BAD_REQUEST,
    "ALREADY_EXISTS": BAD_REQUEST, "CONFLICT": BAD_REQUEST, "RATE_LIMITED": RATE_LIMITED,
    "INTERNAL_ERROR": SERVER_ERROR, "SERVICE_UNAVAILABLE": SERVER_ERROR,
    "MAX_RETRIES_EXCEEDED": WRITE_FAILED,
    "stale_proposal_version": SCHEMA_REJECTED, "stale_schema_version": SCHEMA_REJECTED,
    "dependency_closure_failed": SCHEMA_REJECTED, "migration_not_found": SCHEMA_REJECTED,
    "destructive_confirmation_required": SCHEMA_REJECTED,
    "non_additive_change_requires_plan": SCHEMA_REJECTED,
    "instance_not_initialised": SCHEMA_REJECTED, "invalid_decision_input": SCHEMA_REJECTED,
    401: AUTH_FAILED, 403: AUTH_FAILED, 404: NOT_FOUND, 408: SERVER_ERROR, 429: RATE_LIMITED,
    400: BAD_REQUEST,  # any other 4xx
    500: SERVER_ERROR,  # any other 5xx
}


def verdict_for(error: Exception) -> Verdict:
    """An unknown code is retryable: a newer server must not break an older Worker."""
    status, code = getattr(error, "status", None), getattr(error, "code", None)
    if code is not None:
        kind = _details(error).get("kind") if code == "QUOTA_EXCEEDED" else None
        return VERDICTS.get(str(kind)) or VERDICTS.get(str(code), UNKNOWN)
    if not isinstance(status, int):
        return BAD_REQUEST if isinstance(error, ValueError | TypeError) else UNAVAILABLE
    if status < 400:  # an answer that holds nothing
        return UNAVAILABLE
    return VERDICTS.get(status) or VERDICTS[500 if status >= 500 else 400]


def _details(error: Exception) -> Mapping[str, Any]:
    details = getattr(error, "details", None)
    return details if isinstance(details, Mapping) else {}


def failure(verdict: Verdict, facts: Any, delay: timedelta | None = None) -> ApplicationError:
    benign = verdict is WRITE_PENDING  # waiting is no error; this keeps it out of the Worker's log
    category = ApplicationErrorCategory.BENIGN if benign else ApplicationErrorCategory.UNSPECIFIED
    return ApplicationError(
        verdict.message, facts, type=verdict.type, non_retryable=not verdict.retryable,
        next_retry_delay=delay if verdict.retryable else None, category=category)


@contextmanager
def mapped_errors(longest: timedelta = MAX_RETRY_AFTER) -> Iterator[None]:
    """Turn an error of the client into its row of the table. `from None` keeps its text, which may
    quote a URL or a key, out of Event History. A hint when to try again is heeded up to
    `longest`."""
    try:
        yield
    except ApplicationError:
        raise
    except Exception as error:
        verdict = verdict_for(error)
        hint = getattr(error, "retry_after", None) or _details(error).get("retry_after_seconds")
        wait = verdict.delay
        if isinstance(hint, int | float) and hint > 0:
            wait = timedelta(seconds=min(hint, MAX_RETRY_AFTER.total_seconds()))
        code = getattr(error, "code", None)
        facts = {"code": code and str(code), "status": getattr(error, "status", None)}
        raise failure(verdict, facts, wait and min(wait, longest)) from None


# --- What crosses the Activity boundary ----------------------------------------------------------
# JSON travels as text: from a typed union it would not come back as it went, because the SDK's
# converter reads 1.5 as 1 where an int is allowed, too.

Mutation = Mapping[str, Any]
Scope = Mapping[str, Any]


class ReadOptions(TypedDict, total=False):
    """The client's own; whatever is left out, or None, is the client's default."""

    read_mode: str  # "single-answer", "raw-tables" or "xresponse"
    scope: Scope | None
    read_id: str | None


class WriteOptions(TypedDict, total=False):
    """The client's own. All but `structured_mutations` are about a text."""

    structured_mutations: Sequence[Mutation] | None
    extraction_logic: str  # "fast" or "deep"
    diff_engine: bool | None
    scope: Scope | None


@dataclass(frozen=True)
class ReadInput:
    query: str
    options_json: str = "{}"


@dataclass(frozen=True)
class ReadOutput:
    """`reader_result` None: the schema cannot hold what was asked for. `notice` set: not answered
    as asked, which says nothing about the data. Empty without a notice: nothing matches."""

    reader_result_json: str
    notice: str | None = None
    trace_id: str | None = None
    console_url: str | None = None
    reader_results_json: str = "[]"

    @property
    def reader_result(self) -> Any:
        """As in the client: text, `{columns, rows}`, `{objects, relations}`, or None."""
        return json.loads(self.reader_result_json)

    @property
    def reader_results(self) -> list[dict[str, Any]]:
        """Of a query that was taken apart: `{sub_query, reader_result, error, notice}` each."""
        return list(json.loads(self.reader_results_json))

    def rows(self) -> list[dict[str, Any]]:
        """The rows of a `raw-tables` read, each as `{column: value}`; of another, a failure."""
        table = self.reader_result or {"columns": [], "rows": []}
        try:
            names = [column["name"] for column in table["columns"]]
            return [dict(zip(names, row, strict=True)) for row in table["rows"]]
        except (KeyError, TypeError, ValueError):
            raise wrong("only the answer of a raw-tables read has rows") from None


@dataclass(frozen=True)
class WriteInput:
    text: str = ""
    options_json: str = "{}"


@dataclass(frozen=True)
class WriteOutput:
    """`write_id` is empty if an earlier attempt had written it and only its answer was lost.
    `again`: there was an earlier attempt, which may be queued as well."""

    write_id: str
    trace_id: str | None = None
    changes_json: str = "null"
    again: bool = False

    @property
    def changes(self) -> Any:
        """What a `write` did, `{created, updated, deleted}`; None while queued, or too large."""
        return json.loads(self.changes_json)


@dataclass(frozen=True)
class WaitInput:
    write_id: str
    max_wait_seconds: float
    options_json: str = "{}"
    again: bool = False
    first_poll_seconds: float = FIRST_POLL.total_seconds()
    slowest_poll_seconds: float = SLOWEST_POLL.total_seconds()


@dataclass(frozen=True)
class WriteStatus:
    """`write_status` is queued, processing, extracting, extracted, applying, completed, failed or
    not_found; anything else, from a newer server, means: not finished. Times are ISO 8601."""

    write_id: str
    write_status: str
    error_detail: str | None = None
    completed_at: str | None = None
    changes_json: str = "null"

    @property
    def changes(self) -> Any:
        """What the write did, `{created, updated, deleted}`; None until then, or too large."""
        return json.loads(self.changes_json)


def create(object_type: str, key: Mapping[str, Any], values: Mapping[str, Any]) -> Mutation:
    """A new record. If its key exists, xmemory refuses; the Activities then read the record, and it
    is done if it holds these very values."""
    change = {"key": dict(key), "values": dict(values)}
    return {"object_mutation": {"object_type": object_type, "create": change}}


def update(object_type: str, key: Mapping[str, Any], values: Mapping[str, Any]) -> Mutation:
    """Other values for a record that exists; None clears a field."""
    change = {"key": dict(key), "values": dict(values)}
    return {"object_mutation": {"object_type": object_type, "update": change}}


def delete(object_type: str, key: Mapping[str, Any]) -> Mutation:
    return {"object_mutation": {"object_type": object_type, "delete": {"key": dict(key)}}}


def scope_to(object_type: str, key: Mapping[str, Any]) -> Scope:
    """Bind a read, or a write of text, to one record and what belongs to it."""
    return {"objects": [{"type": object_type, "key": dict(key)}]}


def to_json(value: Any) -> str:
    """Text of what JSON can hold, and of the client's own models; raises ApplicationError."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, default=_plain)
        size = len(text.encode())
    except (TypeError, ValueError):
        raise wrong("memory takes only what JSON can hold; write dates as text") from None
    if size > MAX_BYTES:
        raise failure(TOO_LARGE, {"bytes": size})
    return text


def _plain(model: Any) -> Any:
    if hasattr(model, "model_dump"):
        return model.model_dump(mode="json")
    return vars(model)


def wrong(what: str) -> ApplicationError:
    """Fails the Workflow; any other exception would only retry its Workflow Task for ever."""
    return ApplicationError(what, type=BAD_REQUEST.type, non_retryable=True)


# --- The Activities ------------------------------------------------------------------------------


Method = Callable[..., Awaitable[Any]]


class XmemoryInstance(Protocol):
    """What is used of the client's instance handle: four of its coroutine methods."""

    @property
    def read(self) -> Method: ...
    @property
    def write(self) -> Method: ...
    @property
    def write_async(self) -> Method: ...
    @property
    def write_status(self) -> Method: ...


class MemoryActivities:
    """xmemory as Activities. Their names are in the history of open Workflows: do not rename."""

    def __init__(self, instance: XmemoryInstance) -> None:
        self._instance = instance

    def all(self) -> list[Callable[..., Any]]:
        """The methods to register on a Worker."""
        return [self.read, self.write, self.write_async, self.write_status, self.wait_for_write]

    @activity.defn(name="xmemory_read")
    @heartbeating
    async def read(self, input: ReadInput) -> ReadOutput:
        with mapped_errors():
            options = json.loads(input.options_json)
            found = await _in_time(self._instance.read, input.query, **options)
        return ReadOutput(
            to_json(found.reader_result), found.notice, found.trace_id, found.console_url,
            to_json(list(found.reader_results)))

    @activity.defn(name="xmemory_write")
    @heartbeating
    async def write(self, input: WriteInput) -> WriteOutput:
        """Returns when the write is applied."""
        return await self._write(self._instance.write, input)

    @activity.defn(name="xmemory_write_async")
    @heartbeating
    async def write_async(self, input: WriteInput) -> WriteOutput:
        """Returns when the write is queued. Every call is a job of its own."""
        return await self._write(self._instance.write_async, input)

    @activity.defn(name="xmemory_write_status")
    @heartbeating
    async def write_status(self, write_id: str) -> WriteStatus:
        with mapped_errors():
            return await self._status(write_id)

    @activity.defn(name="xmemory_wait_for_write")
    @heartbeating
    async def wait_for_write(self, input: WaitInput) -> WriteStatus:
        """Ask once how the write stands. Not finished yet is a retryable failure with a delay: the
        Temporal server does the waiting, no Worker slot is held, Event History does not grow."""
        left = _time_left(input.max_wait_seconds)
        with mapped_errors(longest=max(left, timedelta(0))):
            status = await self._status(input.write_id)
        facts = {"write_id": status.write_id, "write_status": status.write_status}
        if status.write_status == "completed":
            return status
        if status.write_status == "not_found":
            raise failure(WRITE_NOT_FOUND, facts)
        if status.write_status == "failed":
            if await self._is_done(input.options_json, input.again):
                return WriteStatus(status.write_id, "completed")
            raise failure(WRITE_FAILED, facts | {"error_detail": status.error_detail})
        if left <= timedelta(0):
            raise failure(WRITE_LATE, facts)
        raise failure(WRITE_PENDING, facts, min(_poll_delay(input), left))

    async def _status(self, write_id: str) -> WriteStatus:
        try:
            found = await _in_time(self._instance.write_status, write_id)
        except ValueError:  # the real client will not parse a status that is new to it
            return WriteStatus(write_id, "unknown")
        word = getattr(found.write_status, "value", found.write_status)  # an enum, in the client
        ended = found.completed_at and found.completed_at.isoformat()
        return WriteStatus(write_id, str(word), found.error_detail, ended, _changes(found))

    async def _write(self, call: Method, input: WriteInput) -> WriteOutput:
        again = activity.in_activity() and activity.info().attempt > 1
        try:
            with mapped_errors():
                options = json.loads(input.options_json)
                written = await _in_time(call, input.text, **options)
        except ApplicationError as error:
            refused = error.type == BAD_REQUEST.type
            if not refused or not await self._is_done(input.options_json, again):
                raise
            return WriteOutput(write_id="")
        return WriteOutput(written.write_id, written.trace_id, _changes(written), again)

    async def _is_done(self, options_json: str, again: bool) -> bool:
        """Whether memory holds what refused mutations ask for, because an attempt whose answer was
        lost had written it; `again` says that there may have been one."""
        mutations = json.loads(options_json).get("structured_mutations", [])
        for mutation in mutations:
            if not await self._holds(mutation.get("object_mutation", {}), again):
                return False
        return bool(mutations)

    async def _holds(self, wanted: Mapping[str, Any], again: bool) -> bool:
        change = wanted.get("create") or wanted.get("update") or wanted.get("delete")
        if not change:
            return False  # a relation: it cannot be read by its key
        record = await self._record(wanted["object_type"], change["key"])
        if "delete" in wanted:
            return again and record is None
        values = change.get("values", {}).items()
        same = record is not None and all(record.get(name) == value for name, value in values)
        if "create" in wanted and record is not None and not same:
            raise failure(CONFLICT, {"object_type": wanted["object_type"]})
        return same

    async def _record(self, object_type: str, key: Mapping[str, Any]) -> Mapping[str, Any] | None:
        options = {"read_mode": "raw-tables", "scope": scope_to(object_type, key)}
        try:
            found = await self.read(ReadInput(object_type, to_json(options)))
        except ApplicationError as error:
            if error.type == BAD_REQUEST.type:  # a scope to a record that is not there
                return None
            raise
        return next((row for row in found.rows() if key.items() <= row.items()), None)


def client_timeout() -> float | None:
    """Seconds that the client may take: always less than Temporal gives the Activity."""
    if not activity.in_activity() or (given := activity.info().start_to_close_timeout) is None:
        return None
    return max((given - CLIENT_MARGIN).total_seconds(), 0.0) or given.total_seconds() * CLIENT_SHARE


async def _in_time(call: Method, *args: Any, **options: Any) -> Any:
    """The client's own timeout is for every part of an answer; this one is for the whole."""
    seconds = client_timeout()
    async with asyncio.timeout(seconds):
        return await call(*args, **options, timeout=seconds)


def _changes(found: Any) -> str:
    """A report that is too large is left out: the write is made all the same."""
    try:
        return to_json(getattr(found, "changes", None))
    except ApplicationError:
        return "null"


def _time_left(max_wait_seconds: float) -> timedelta:
    """Until the deadline of a wait, by the server's clock. One poll always falls on it, so a write
    that ends there is not lost. Temporal's own limit lies later: it drops a retry whose delay would
    pass that limit."""
    passed = timedelta(0)
    if activity.in_activity():
        passed = activity.info().started_time - activity.info().scheduled_time
    return timedelta(seconds=max_wait_seconds) - passed


def _poll_delay(input: WaitInput) -> timedelta:
    attempt = activity.info().attempt if activity.in_activity() else 1
    seconds = input.first_poll_seconds * POLL_GROWTH ** min(attempt - 1, STEEPEST)
    return timedelta(seconds=min(seconds, input.slowest_poll_seconds))


# --- The handle a Workflow uses ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkflowMemory:
    """The client's methods, run as Activities, and `write_durable`.

    Every option is per operation: `read`, `write` and the two that only touch the queue. A
    `write_retry_policy` of your own holds for free text as well: give one only if every key stands
    in the text word for word. `include_content` puts the first characters of a text or query into
    the summaries that the Temporal Web UI shows.

    Every method raises ApplicationError (XmemoryBadRequest, XmemoryTooLarge) before anything is
    scheduled if its arguments are wrong, and ActivityError, whose cause has a type of the table
    above, if the Activity failed.
    """

    read_timeout: timedelta = READ_TIMEOUT
    write_timeout: timedelta = WRITE_TIMEOUT
    queue_timeout: timedelta = QUEUE_TIMEOUT
    heartbeat_timeout: timedelta = HEARTBEAT_TIMEOUT
    read_retry_policy: RetryPolicy = field(default_factory=lambda: RETRIED)
    write_retry_policy: RetryPolicy | None = None
    status_retry_policy: RetryPolicy = field(default_factory=lambda: RETRIED)
    first_poll: timedelta = FIRST_POLL
    slowest_poll: timedelta = SLOWEST_POLL
    include_content: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, timedelta) and value <= timedelta(0):
                raise wrong(f"{name} must be longer than nothing")

    async def read(self, query: str, **options: Unpack[ReadOptions]) -> ReadOutput:
        if not isinstance(query, str) or not query.strip():
            raise wrong("read() needs a query")
        to_json(query)
        input = ReadInput(query, to_json(_checked(options, ReadOptions)))
        return await self._run(MemoryActivities.read, input, self.read_timeout,
                               self.read_retry_policy, self._summary("read", query))

    async def write(self, text: str = "", **options: Unpack[WriteOptions]) -> WriteOutput:
        """Write, and wait until it is applied."""
        input = _write_input(text, options)
        return await self._send(MemoryActivities.write, "write", input, self.write_timeout)

    async def write_async(self, text: str = "", **options: Unpack[WriteOptions]) -> WriteOutput:
        """Queue a write and go on; `write_status` says how it stands."""
        input = _write_input(text, options)
        return await self._send(MemoryActivities.write_async, "write_async", input,
                                self.queue_timeout)

    async def write_status(self, write_id: str) -> WriteStatus:
        if not isinstance(write_id, str) or not write_id:
            raise wrong("write_status() needs the write_id of a queued write")
        return await self._run(MemoryActivities.write_status, write_id, self.queue_timeout,
                               self.status_retry_policy, "xmemory write_status")

    async def write_durable(
        self, text: str = "", *, max_wait: timedelta = MAX_WAIT, **options: Unpack[WriteOptions]
    ) -> WriteStatus:
        """Queue a write and wait for it, however often Workers die meanwhile.

        Two Activities, so the same few events in history whether it takes seconds or days. A text
        is extracted "deep" unless told otherwise. Beside what every method raises: the causes
        XmemoryWriteFailed and XmemoryWriteNotFound, and ApplicationError of type
        XmemoryWriteTimeout with the write id in its details, to ask again later.
        """
        if max_wait <= timedelta(0):
            raise wrong("max_wait must be longer than nothing")
        input = _write_input(text, {"extraction_logic": "deep", **options} if text else options)
        queued = await self._send(MemoryActivities.write_async, "write_async", input,
                                  self.queue_timeout)
        if not queued.write_id:
            return WriteStatus(queued.write_id, "completed")
        wait = WaitInput(queued.write_id, max_wait.total_seconds(), input.options_json,
                         queued.again, self.first_poll.total_seconds(),
                         self.slowest_poll.total_seconds())
        try:
            return await self._run(MemoryActivities.wait_for_write, wait, self.queue_timeout,
                                   WAITING, "xmemory wait for write",
                                   limit=max_wait + self.queue_timeout)
        except ActivityError as error:
            # With no Worker alive at the deadline it is the server's timeout, else our own verdict.
            ours = isinstance(error.cause, ApplicationError) and error.cause.type == WRITE_LATE.type
            if ours or error.retry_state == RetryState.TIMEOUT:
                raise failure(WRITE_LATE, {"write_id": queued.write_id}) from None
            raise

    async def _send(
        self, run: Callable[[MemoryActivities, WriteInput], Awaitable[WriteOutput]], name: str,
        input: WriteInput, timeout: timedelta,
    ) -> WriteOutput:
        policy = self.write_retry_policy or (ONCE if input.text else RETRIED)
        try:
            return await self._run(run, input, timeout, policy, self._summary(name, input.text))
        except ActivityError as error:
            lost = not isinstance(error.cause, ApplicationError) or error.cause.type in (
                UNAVAILABLE.type, SERVER_ERROR.type, UNKNOWN.type)
            if input.text and lost and not is_cancelled(error):
                raise failure(WRITE_UNCERTAIN, {}) from None
            raise

    def _summary(self, name: str, content: str) -> str:
        shown = f"{content[:EXCERPT]!r}" if self.include_content else f"{len(content)} chars"
        return f"xmemory {name}: {shown if content else 'structured'}"

    async def _run(
        self, run: Callable[[MemoryActivities, In], Awaitable[R]], input: In,
        timeout: timedelta, policy: RetryPolicy, summary: str, *, limit: timedelta | None = None,
    ) -> R:
        return await workflow.execute_activity_method(
            run, input, start_to_close_timeout=timeout, schedule_to_close_timeout=limit,
            heartbeat_timeout=self.heartbeat_timeout, retry_policy=policy, summary=summary)


memory_for_workflow = WorkflowMemory  # how it reads in a Workflow

CHOICES = {"read_mode": ("single-answer", "raw-tables", "xresponse"),
           "extraction_logic": ("fast", "deep")}


def _write_input(text: str, given: WriteOptions) -> WriteInput:
    """Refuses, before anything is scheduled, what the client would refuse."""
    options = _checked(given, WriteOptions)
    mutations = options.get("structured_mutations")
    if not isinstance(text, str) or bool(text.strip()) == (mutations is not None):
        raise wrong("a write needs either a text or structured_mutations")
    if mutations is not None and not mutations:
        raise wrong("structured_mutations is empty; leave the write out")
    if mutations is not None and len(options) > 1:
        raise wrong("scope, extraction_logic and diff_engine are for a text, not for mutations")
    to_json(text)
    return WriteInput(text, to_json(options))


def _checked(given: Mapping[str, Any], allowed: type) -> dict[str, Any]:
    options = {name: value for name, value in given.items() if value is not None}
    if unknown := sorted(options.keys() - allowed.__annotations__.keys()):
        raise wrong(f"memory has no option {unknown[0]!r}")
    for name, choices in CHOICES.items():
        if options.get(name, choices[0]) not in choices:
            raise wrong(f"{name} must be one of: {', '.join(choices)}")
    try:
        named = options["scope"]["objects"] if "scope" in options else [{"type": "-", "key": "-"}]
        if not named or not all(each["type"] and each["key"] for each in named):
            raise ValueError
        for mutation in options.get("structured_mutations", ()):
            ((_, change),) = mutation.items()
            if len(change.keys() & {"create", "update", "delete"}) != 1:
                raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise wrong("malformed scope or mutation; make them with scope_to(), create(), update() "
                    "and delete()") from None
    return options


# --- The plugin: for projects that let the Client bring the Activities ---------------------------


@dataclass(frozen=True)
class XmemoryConfig:
    """Where memory is. What is empty comes from the environment; of the API key this holds the
    variable's name and never the key, so nothing secret can be stored or logged with it."""

    instance_id: str = ""  # else XMEM_INSTANCE_ID
    url: str = ""  # else XMEM_API_URL, else the service
    api_key_variable: str = "XMEM_API_KEY"


class XmemoryClient(Protocol):
    """What is used of the client."""

    def instance(self, instance_id: str) -> XmemoryInstance: ...
    async def aclose(self) -> None: ...


def connect_client(url: str | None, api_key: str) -> XmemoryClient:
    """The real client, `pip install xmemory-ai`. It obeys no proxy variable (as of 0.23)."""
    from xmemory import AsyncXmemoryClient

    client: XmemoryClient = AsyncXmemoryClient(url, api_key=api_key)
    return client


class XmemoryPlugin(SimplePlugin):
    """Registers the memory Activities on every Worker of a Client; give it to the Client alone.

    Every Worker has a client of its own, closed when that Worker stops. A Worker without the API
    key or the instance id is refused when it is made: ValueError names the missing variable.
    """

    def __init__(
        self, config: XmemoryConfig = XmemoryConfig(), *,
        connect: Callable[[str | None, str], XmemoryClient] = connect_client,
    ) -> None:
        super().__init__("xmemory")
        self._xmemory, self._connect = config, connect
        self._clients: dict[MemoryActivities, XmemoryClient] = {}

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        if _registered(config):
            raise ValueError("the memory Activities are registered twice: give the plugin to the "
                             "Client alone, and to no Worker that brings its own")
        instance_id = self._xmemory.instance_id or _variable("XMEM_INSTANCE_ID")
        url = self._xmemory.url or os.environ.get("XMEM_API_URL") or None
        if url and not url.startswith(("http://", "https://")):
            raise ValueError("XMEM_API_URL, or the url of the config, must start with http(s)://")
        client = self._connect(url, _variable(self._xmemory.api_key_variable))
        memory = MemoryActivities(client.instance(instance_id))
        self._clients[memory] = client
        config["activities"] = [*config.get("activities", ()), *memory.all()]
        return super().configure_worker(config)

    async def run_worker(self, worker: Worker, next: Callable[[Worker], Awaitable[None]]) -> None:
        try:
            await super().run_worker(worker, next)
        finally:
            for memory in _registered(worker.config(active_config=True)):
                await self._clients.pop(memory).aclose()


def _registered(config: WorkerConfig) -> set[MemoryActivities]:
    owners = {getattr(run, "__self__", None) for run in config.get("activities", ())}
    return {owner for owner in owners if isinstance(owner, MemoryActivities)}


def _variable(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if value.isascii() and value.isprintable() and value:
        return value
    what = "holds what no key or id can" if value else "is not set"
    raise ValueError(f"{name} {what}; this Worker needs it to reach xmemory")

"""Long-term memory (xmemory) for Temporal Workflows. Copy this file; it needs nothing beside it.

Memory is what an agent carries from one run to the next. It does not say which steps are done
(Event History does) or whether an effect happened (its owner does). Three rules hold here:

* A free-text write is sent at most once, because a second extraction may file the same fact under
  another key, such as "Dr. Ann" for "Ann". A structured mutation carries its key and is retried.
* Temporal owns every retry and every wait, including the wait for a queued write.
* A failure shows no key, no transport text and no content.

In a Workflow:

    memory = memory_for_workflow()
    found = await memory.read("What does Ann like?")
    await memory.write_durable("Ann: likes tea")

For the Workers: `Client.connect(..., plugins=[XmemoryPlugin()])`; or, without the plugin,
`activities=MemoryActivities(instance).all()`, where `instance` is the client's
`AsyncXmemoryClient(...).instance("...")` or anything that has its four methods.

Texts, queries and results are inputs and results of Activities, so Event History holds them in
clear. Use a payload codec if it must not.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from temporalio import activity, workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ApplicationErrorCategory,
    RetryState,
    is_cancelled_exception,
)
from temporalio.plugin import SimplePlugin

P = ParamSpec("P")
R = TypeVar("R")
In = TypeVar("In")

JsonObject = Mapping[str, Any]
Mutation = JsonObject
Scope = JsonObject
XmemoryInstance = Any  # the client's handle of an instance: read, write, write_async, write_status

# --- What a Workflow says ------------------------------------------------------------------------


def create(object_type: str, key: JsonObject, values: JsonObject) -> Mutation:
    """A new record. xmemory refuses it if the key exists. The handle then reads the record, and the
    create counts as done if the record holds these very values."""
    change = {"key": key, "values": values}
    return {"object_mutation": {"object_type": object_type, "create": change}}


def update(object_type: str, key: JsonObject, values: JsonObject) -> Mutation:
    """Other values for a record that exists. None clears a field."""
    change = {"key": key, "values": values}
    return {"object_mutation": {"object_type": object_type, "update": change}}


def delete(object_type: str, key: JsonObject) -> Mutation:
    """No record of this key. If there is none, the delete counts as done. xmemory gives the same
    answer to a misspelled type or key, so a delete that names nothing counts as done as well."""
    return {"object_mutation": {"object_type": object_type, "delete": {"key": key}}}


def scope_to(object_type: str, key: JsonObject) -> Scope:
    """Bind a read, or a write of text, to one record."""
    return {"objects": [{"type": object_type, "key": key}]}


# --- What crosses the Activity boundary ----------------------------------------------------------
# An Activity takes one input, and these types only ever gain fields with a default: otherwise a
# Workflow that is open while the Workers are upgraded breaks. `Any` holds JSON values, which come
# through Temporal's converter unchanged; a field typed `int | float` would turn 1.5 into 1.


@dataclass(frozen=True)
class ReadInput:
    query: str
    options: dict[str, Any]  # the client's own


@dataclass(frozen=True)
class ReadOutput:
    """The client's result. `reader_result` is text, `{columns, rows}`, `{objects, relations}`, or
    None if the schema cannot hold what was asked for. An empty result without a `notice` means that
    nothing matches. With a `notice`, the query was not answered as asked, and an empty result says
    nothing about the data."""

    reader_result: Any = None
    notice: str | None = None
    trace_id: str | None = None
    reader_results: list[Any] | None = None  # the parts of a query that xmemory has split

    def rows(self) -> list[dict[str, Any]]:
        """The rows of a read with `read_mode="raw-tables"`, each as `{column: value}`."""
        if self.reader_result is None:
            return []
        with client_errors():  # the result of another read mode has no rows
            names = [column["name"] for column in self.reader_result["columns"]]
            return [dict(zip(names, row, strict=True)) for row in self.reader_result["rows"]]


@dataclass(frozen=True)
class WriteInput:
    text: str
    options: dict[str, Any]


@dataclass(frozen=True)
class WriteOutput:
    """`write_id` is empty if an earlier attempt had made the write and only its answer was lost."""

    write_id: str
    trace_id: str | None = None
    changes: Any = None  # {created, updated, deleted}; None while the write is queued


@dataclass(frozen=True)
class WaitInput:
    write_id: str


@dataclass(frozen=True)
class WriteStatus:
    """`write_status` is queued, processing, extracting, extracted, applying, completed, failed or
    not_found. Any other word comes from a newer service and means: not finished."""

    write_id: str
    write_status: str
    error_detail: str | None = None
    changes: Any = None


def build(kind: type[R], **fields: Any) -> R:
    """Make an input or output of JSON values and of the client's own models. Anything else, such as
    a date, is XmemoryBadRequest. The Temporal server refuses a payload of 2 MiB, and then a Worker
    repeats the task for ever. So what comes close to that fails here."""
    with client_errors():
        text = json.dumps(fields, default=lambda model: model.model_dump(mode="json"))
        if len(text) > 1_500_000:
            raise failure("XmemoryTooLarge", characters=len(text))
        return kind(**json.loads(text))


# --- The handle a Workflow uses ------------------------------------------------------------------

RETRIED = RetryPolicy(maximum_interval=timedelta(seconds=30), maximum_attempts=10)
ONCE = RetryPolicy(maximum_attempts=1)  # for free text: see the first rule


@dataclass(kw_only=True)
class WorkflowMemory:
    """The client's methods, run as Activities, and `write_durable`.

    `options` are the client's own. A read takes `read_mode`, `scope` and `read_id`. A write of text
    takes `extraction_logic`, `diff_engine` and `scope`. A write of records takes
    `structured_mutations` and no text. Every method raises only ApplicationError, with a type of
    the table `ERRORS` or "TimedOut".

    Reads and `write_status` are retried by the `read_retry_policy`. A write of records is retried,
    and a text is sent once. A `write_retry_policy` holds for both. Give one only if each of your
    texts spells out its keys.
    """

    read_timeout: timedelta = timedelta(seconds=120)  # a deep read takes a minute or two
    write_timeout: timedelta = timedelta(seconds=180)  # `write` returns when its job is applied
    queue_timeout: timedelta = timedelta(seconds=30)  # the other calls only touch the queue
    heartbeat_timeout: timedelta = timedelta(seconds=10)  # how long a dead Worker goes unnoticed
    read_retry_policy: RetryPolicy = field(default_factory=lambda: RETRIED)
    write_retry_policy: RetryPolicy | None = None
    first_poll: timedelta = timedelta(seconds=2)
    slowest_poll: timedelta = timedelta(seconds=30)

    async def read(self, query: str, **options: Any) -> ReadOutput:
        return await self.run_activity(
            MemoryActivities.read,
            build(ReadInput, query=query, options=options),
            timeout=self.read_timeout,
            retry_policy=self.read_retry_policy,
        )

    async def write(self, text: str = "", **options: Any) -> WriteOutput:
        """Write, and wait until the write is applied."""
        return await self._send(MemoryActivities.write, text, options, self.write_timeout)

    async def write_async(self, text: str = "", **options: Any) -> WriteOutput:
        """Queue a write. `write_status` tells what became of it."""
        return await self._send(MemoryActivities.write_async, text, options, self.queue_timeout)

    async def write_status(self, write_id: str) -> WriteStatus:
        return await self.run_activity(
            MemoryActivities.write_status,
            WaitInput(write_id),
            timeout=self.queue_timeout,
            retry_policy=self.read_retry_policy,
        )

    async def write_durable(
        self, text: str = "", *, max_wait: timedelta = timedelta(minutes=15), **options: Any
    ) -> WriteStatus:
        """Queue a write and wait for it, however often Workers die meanwhile.

        Text is extracted "deep" unless the options say otherwise. A write that is not finished
        after `max_wait` is XmemoryWriteTimeout with the write_id in its details: the write goes on,
        and `write_status` can ask for it later.
        """
        if max_wait <= timedelta(0):  # Temporal takes 0 for "no limit".
            raise failure("XmemoryBadRequest", wrong="max_wait")
        if text:
            options = {"extraction_logic": "deep", **options}
        queued = await self.write_async(text, **options)
        if not queued.write_id:  # an earlier attempt had made the write
            return WriteStatus("", "completed")
        # The Activity fails with "not finished yet", and the server retries it until the limit. A
        # failed attempt that is retried is not an event, so the wait costs the same few events
        # whether it takes seconds or days, and it holds no slot of a Worker.
        polling = RetryPolicy(
            initial_interval=self.first_poll,
            backoff_coefficient=1.5,
            maximum_interval=max(self.first_poll, self.slowest_poll),
        )
        try:
            return await self.run_activity(
                MemoryActivities.wait_for_write,
                WaitInput(queued.write_id),
                timeout=self.queue_timeout,
                retry_policy=polling,
                limit=max_wait,
            )
        except ApplicationError as error:
            if error.type == "TimedOut":
                raise failure("XmemoryWriteTimeout", write_id=queued.write_id) from None
            if error.type == "XmemoryWriteFailed" and await self._is_done(options):
                return WriteStatus(queued.write_id, "completed")
            raise

    async def _send(
        self,
        step: Callable[["MemoryActivities", WriteInput], Awaitable[WriteOutput]],
        text: str,
        options: JsonObject,
        timeout: timedelta,
    ) -> WriteOutput:
        try:
            return await self.run_activity(
                step,
                build(WriteInput, text=text, options=options),
                timeout=timeout,
                retry_policy=self.write_retry_policy or (ONCE if text else RETRIED),
            )
        except ApplicationError as error:
            lost = error.type in ("TimedOut", "XmemoryUnavailable", "XmemoryServerError")
            if text and lost:
                raise failure("XmemoryWriteUncertain") from None
            if error.type == "XmemoryBadRequest" and not text and await self._is_done(options):
                return WriteOutput("")
            raise

    async def _is_done(self, options: JsonObject) -> bool:
        """Whether memory already holds what the refused mutations wanted. An attempt whose answer
        was lost may have made them. xmemory makes all mutations of a write or none."""
        mutations = options.get("structured_mutations") or ()
        with client_errors():  # A mutation made by hand may be malformed.
            done = [await self._holds(each.get("object_mutation", {})) for each in mutations]
        return bool(done) and all(done)

    async def _holds(self, wanted: JsonObject) -> bool:
        change = wanted.get("create") or wanted.get("update") or wanted.get("delete")
        if not change:
            return False  # It changes no record, but a relation, which has no key to read it by.
        name, key, rows = wanted["object_type"], change["key"], []
        try:
            found = await self.read(name, read_mode="raw-tables", scope=scope_to(name, key))
            rows = [row for row in found.rows() if key.items() <= row.items()]
        except ApplicationError as error:
            if error.type != "XmemoryBadRequest":  # how xmemory refuses a scope to no record
                raise
        if "delete" in wanted:
            return not rows
        if not rows:
            return False
        same = all(rows[0].get(column) == value for column, value in change["values"].items())
        if "create" in wanted and not same:
            raise failure("XmemoryConflict", object_type=name)
        return same

    async def run_activity(
        self,
        step: Callable[["MemoryActivities", In], Awaitable[R]],
        input: In,
        *,
        timeout: timedelta,
        retry_policy: RetryPolicy,
        limit: timedelta | None = None,
    ) -> R:
        """Every method above runs its Activity here. `step` is an unbound method, such as
        `MemoryActivities.read`. `timeout` bounds an attempt, and `limit` all attempts together.

        A program without Temporal can override this method and await `step(activities, input)`. It
        then repeats a step that fails with XmemoryWritePending, and raises ApplicationError of type
        "TimedOut" when `limit` has passed.
        """
        with application_errors():
            return await workflow.execute_activity_method(
                step,
                input,
                start_to_close_timeout=timeout,
                schedule_to_close_timeout=limit,
                heartbeat_timeout=self.heartbeat_timeout,
                retry_policy=retry_policy,
            )


memory_for_workflow = WorkflowMemory  # the name that Workflow code uses


@contextmanager
def application_errors() -> Iterator[None]:
    """Around an Activity that a Workflow runs: its failure is raised as the ApplicationError that
    the Activity raised, and a cancellation as CancelledError. ActivityError never passes.

    At a schedule-to-close limit Temporal reports either a timeout or the last failure. Both have
    the retry state TIMEOUT, and both become "TimedOut".
    """
    try:
        yield
    except ActivityError as error:
        if is_cancelled_exception(error):
            raise asyncio.CancelledError from None
        cause = error.cause
        if error.retry_state == RetryState.TIMEOUT or not isinstance(cause, ApplicationError):
            cause = ApplicationError(
                "the Activity did not finish in time", type="TimedOut", non_retryable=True
            )
        raise cause from None


# --- Errors: one table ---------------------------------------------------------------------------


class Kind(NamedTuple):
    message: str  # fixed, because Event History shows it in clear
    answers: tuple[Any, ...] = ()  # codes of xmemory, and HTTP statuses without a code
    retryable: bool = False


ERRORS = {  # The types are stable: match them in an `except` or a RetryPolicy.
    "XmemoryUnavailable": Kind("xmemory did not answer", retryable=True),
    "XmemoryServerError": Kind("xmemory answered with a server error", (408,), retryable=True),
    "XmemoryRateLimited": Kind("xmemory asked to slow down", ("RATE_LIMITED", 429), retryable=True),
    "XmemoryQuotaExceeded": Kind("an xmemory quota is used up", ("QUOTA_EXCEEDED",)),
    "XmemoryAuthFailed": Kind(
        "xmemory refused the API key", ("UNAUTHORIZED", "FORBIDDEN", 401, 403)
    ),
    "XmemoryNotFound": Kind("xmemory has no such instance", ("NOT_FOUND", 404)),
    "XmemoryBadRequest": Kind(
        "xmemory or its client refused the request",
        ("VALIDATION_ERROR", "INVALID_INPUT", "ALREADY_EXISTS", "CONFLICT"),
    ),
    "XmemoryWriteFailed": Kind("xmemory could not apply the write", ("MAX_RETRIES_EXCEEDED",)),
    "XmemoryWriteNotFound": Kind("xmemory does not know this write"),
    "XmemoryWriteTimeout": Kind("the write did not finish within max_wait"),
    "XmemoryWritePending": Kind("the write has not finished yet", retryable=True),
    "XmemoryWriteUncertain": Kind("no answer: a job may be queued, so the text is not sent again"),
    "XmemoryConflict": Kind("the record exists, with other values"),
    "XmemoryTooLarge": Kind("too large for Event History; ask for less"),
}


def error_type(error: Exception) -> str:
    """The row of an error. The client's errors are known by their attributes, so this file needs no
    client library. A code of xmemory that is not in the table is retryable: a newer service must
    not break an older Worker. Another 4xx without a code is XmemoryBadRequest."""
    answer = getattr(error, "code", None) or getattr(error, "status", None) or 0
    for name, kind in ERRORS.items():
        if answer in kind.answers:
            return name
    if isinstance(answer, str) or answer >= 500:
        return "XmemoryServerError"
    # These four say that the client cannot use the arguments.
    mistake = isinstance(error, ValueError | TypeError | LookupError | AttributeError)
    return "XmemoryBadRequest" if mistake or answer >= 400 else "XmemoryUnavailable"


def failure(type: str, delay: timedelta | None = None, **details: Any) -> ApplicationError:
    category = ApplicationErrorCategory.UNSPECIFIED
    if type == "XmemoryWritePending":  # Waiting is no error: the Worker's log leaves it out.
        category = ApplicationErrorCategory.BENIGN
    kind = ERRORS[type]
    return ApplicationError(
        kind.message,
        details,
        type=type,
        non_retryable=not kind.retryable,
        next_retry_delay=delay,
        category=category,
    )


@contextmanager
def client_errors() -> Iterator[None]:
    """Turn an error of the client into its row of the table. `from None` keeps its text, which may
    quote a URL or a key, out of Event History."""
    try:
        yield
    except ApplicationError:
        raise
    except Exception as error:
        hint = getattr(error, "retry_after", None)
        # The delay overrides the RetryPolicy, and a service may ask for a day. No Workflow should
        # stand still for that long, so the call is tried again after a minute at most.
        delay = timedelta(seconds=min(hint, 60)) if hint else None
        code, status = getattr(error, "code", None), getattr(error, "status", None)
        raise failure(error_type(error), delay, code=code, status=status) from None


# --- Heartbeats and timeouts ---------------------------------------------------------------------

# One late beat does no harm. The SDK's Worker holds beats back: by default it sends one in 80 % of
# the timeout, and `max_heartbeat_throttle_interval` changes that.
BEATS_PER_TIMEOUT = 4


def heartbeating(run: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Let an async Activity heartbeat for as long as it runs. Outside an Activity, do nothing.

    With beats, the heartbeat timeout bounds how long a dead Worker goes unnoticed. Without beats
    that timeout is a trap: Temporal gives the attempt up, but the attempt runs on and overlaps the
    next one.
    """

    @wraps(run)
    async def beating(*args: P.args, **kwargs: P.kwargs) -> R:
        beats = asyncio.create_task(_beat())
        try:
            return await run(*args, **kwargs)
        finally:
            beats.cancel()

    return beating


async def _beat() -> None:
    timeout = activity.info().heartbeat_timeout if activity.in_activity() else None
    while timeout:
        await asyncio.sleep(timeout.total_seconds() / BEATS_PER_TIMEOUT)
        activity.heartbeat()


def client_timeout() -> float | None:
    """Seconds that a client may take: less than Temporal gives the attempt, because the client's
    error says more than Temporal's timeout. None outside an Activity."""
    timeout = activity.info().start_to_close_timeout if activity.in_activity() else None
    return timeout.total_seconds() * 0.8 if timeout else None


# --- The Activities ------------------------------------------------------------------------------


class MemoryActivities:
    """xmemory as Activities. Open Workflows know them by these names: do not rename them."""

    def __init__(self, instance: XmemoryInstance) -> None:
        self.instance = instance

    def all(self) -> list[Callable[..., Any]]:
        """The methods to register on a Worker."""
        return [self.read, self.write, self.write_async, self.write_status, self.wait_for_write]

    @activity.defn(name="xmemory_read")
    @heartbeating
    async def read(self, input: ReadInput) -> ReadOutput:
        with client_errors():
            return await _call(ReadOutput, self.instance.read, input.query, **input.options)

    @activity.defn(name="xmemory_write")
    @heartbeating
    async def write(self, input: WriteInput) -> WriteOutput:
        with client_errors():
            return await _call(WriteOutput, self.instance.write, input.text, **input.options)

    @activity.defn(name="xmemory_write_async")
    @heartbeating
    async def write_async(self, input: WriteInput) -> WriteOutput:
        with client_errors():
            return await _call(WriteOutput, self.instance.write_async, input.text, **input.options)

    @activity.defn(name="xmemory_write_status")
    @heartbeating
    async def write_status(self, input: WaitInput) -> WriteStatus:
        with client_errors():
            try:
                return await _call(WriteStatus, self.instance.write_status, input.write_id)
            except ValueError:  # The real client does not parse a status that is new to it.
                return WriteStatus(input.write_id, "unknown")

    @activity.defn(name="xmemory_wait_for_write")
    @heartbeating
    async def wait_for_write(self, input: WaitInput) -> WriteStatus:
        """Ask once. `write_durable` says why "not finished yet" is a failure."""
        found = await self.write_status(input)
        if found.write_status == "completed":
            return found
        outcomes = {"failed": "XmemoryWriteFailed", "not_found": "XmemoryWriteNotFound"}
        outcome = outcomes.get(found.write_status, "XmemoryWritePending")
        raise failure(outcome, write_id=input.write_id, error_detail=found.error_detail)


async def _call(
    kind: type[R], call: Callable[..., Awaitable[Any]], *args: Any, **options: Any
) -> R:
    """Call the client and keep the fields of its result that `kind` has."""
    found = await call(*args, **options, timeout=client_timeout())
    kept = {name: getattr(found, name) for name in kind.__annotations__ if hasattr(found, name)}
    return build(kind, **kept)


# --- The plugin: for projects that let the Client bring the Activities ---------------------------


class XmemoryPlugin(SimplePlugin):
    """Registers the memory Activities on every Worker of a Client. Give it to the Client alone.

    The Workers share one client, which is opened when the first of them runs and closed when the
    last of them stops. The API key comes from XMEM_API_KEY, and the instance from XMEM_INSTANCE_ID
    unless it is given. XMEM_API_URL is another address than the service's. A variable that is
    missing or malformed is a ValueError here, because a Worker that fails while it starts can hang.
    """

    def __init__(self, instance_id: str = "", connect: Callable[..., Any] | None = None) -> None:
        """`connect(api_key=...)` makes a client; by default it is that of `xmemory-ai`."""
        if connect is None:
            from xmemory import AsyncXmemoryClient

            connect = AsyncXmemoryClient
        if not os.environ.get("XMEM_API_URL", "http").startswith("http"):
            raise ValueError("XMEM_API_URL must start with http:// or https://")
        self._connect = partial(connect, api_key=_variable("XMEM_API_KEY"))
        self._instance_id = instance_id or _variable("XMEM_INSTANCE_ID")
        self._memory, self._workers = MemoryActivities(None), 0
        super().__init__("xmemory", activities=self._memory.all(), run_context=self._running)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        if not self._workers:
            self._client = self._connect()
            self._memory.instance = self._client.instance(self._instance_id)
        self._workers += 1
        try:
            yield
        finally:
            self._workers -= 1
            if not self._workers:
                await self._client.aclose()


def _variable(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if value and value.isascii() and value.isprintable():
        return value
    raise ValueError(f"{name} is not set, or holds what no key and no id can")

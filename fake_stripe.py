"""An in-memory Stripe with the call shape of `stripe.StripeClient`: refunds and payment intents.

The stand-in is never more generous than Stripe. An idempotency key that is sent twice makes one
refund. A request without a key is a new request every time. The refunds of a charge never exceed
its captured amount.

It copies four things from Stripe's v1 API: the idempotency layer, the statuses of payments and
refunds, the order of the checks, and the errors of the Python SDK. It knows only the parameters
that a refund agent sends, and refuses all others. It has no network. To keep its records when an
agent is killed, keep this object in another process.

Tests cause faults with `fail_next`, `hold_next_create`, `settle` and the public attributes. Keys
expire by `time.time()`, so a frozen clock works.

Sources: Stripe's API reference (idempotent requests, errors, refunds) and stripe-python 16.
"""

import asyncio
import copy
import itertools
import json
import time
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

KEY_RETENTION_SECONDS = 24 * 60 * 60  # Stripe may forget a key after a day; it is then a new key

Record = dict[str, Any]

# --- Errors: the names and attributes of the SDK -------------------------------------------------


class StripeError(Exception):
    """Callers should branch on `http_status` and `error.code`. As in the SDK, `code` is None on
    most classes even if `error.code` is set."""

    def __init__(
        self,
        message: str,
        http_status: int | None = None,
        type: str = "api_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.error = SimpleNamespace(type=type, code=code, param=param, message=message)
        self.code: str | None = None
        self.should_retry = isinstance(self, APIConnectionError)


class APIError(StripeError): ...


class APIConnectionError(StripeError): ...


class AuthenticationError(StripeError): ...


class PermissionError(StripeError): ...


class RateLimitError(StripeError): ...


class IdempotencyError(StripeError): ...


class InvalidRequestError(StripeError):
    def __init__(
        self,
        message: str,
        http_status: int = 400,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, http_status, type, code, param)
        self.code, self.param = code, param


def rate_limited() -> StripeError:
    return RateLimitError("Too many requests.", 429, "invalid_request_error", "rate_limit")


def server_error() -> StripeError:
    return APIError("An unknown error occurred.", 500)


def connection_lost() -> StripeError:
    return APIConnectionError("Could not communicate with Stripe.")


def not_permitted() -> StripeError:
    return PermissionError("This key lacks a permission.", 403, "invalid_request_error")


# --- What is kept --------------------------------------------------------------------------------


class Call(NamedTuple):
    """One request that arrived. `endpoint` is `refunds.create`, `payment_intents.retrieve`, ..."""

    endpoint: str
    idempotency_key: str | None


class Fault(NamedTuple):
    error: StripeError
    acted: bool  # the request is carried out, and then answered with the error
    stored: bool  # the error is stored for the key


class Stored(NamedTuple):
    """What Stripe remembers of a key: the first request and its answer."""

    request: str
    at: float
    answer: Any


# --- The service ---------------------------------------------------------------------------------


class FakeStripe:
    """One Stripe account, and a client of it that uses `api_key`."""

    def __init__(self, api_key: str | None = "sk_test_fake") -> None:
        self.api_key = api_key
        self.payments: dict[str, Record] = {}
        self.charges: dict[str, Record] = {}
        self.refunds: dict[str, Record] = {}
        self.calls: list[Call] = []
        self.next_statuses: list[str] = []  # of the next refunds; the others are "succeeded"
        self.answer_delay_seconds = 0.0  # between making a refund and answering
        self._stored: dict[str, Stored] = {}
        self._running: set[str] = set()  # keys of requests that have not acted yet
        self._faults: dict[str, list[Fault]] = defaultdict(list)
        self._holds: dict[str, asyncio.Event] = {}
        self._released = asyncio.Event()
        self._numbers = itertools.count(1)
        self.v1 = SimpleNamespace(
            refunds=SimpleNamespace(
                create_async=self._create_refund,
                retrieve_async=self._retrieve_refund,
                list_async=self._list_refunds,
            ),
            payment_intents=SimpleNamespace(retrieve_async=self._retrieve_payment),
        )

    # --- For tests: records and faults -----------------------------------------------------------

    def add_payment(
        self,
        amount: int,
        currency: str,
        *,
        status: str = "succeeded",
        captured: int | None = None,
        refunded: int = 0,
    ) -> str:
        """Record a payment with one charge. Amounts are in the smallest unit of the currency.
        Give `captured` if less than `amount` was captured. Return the payment intent's id."""
        # For each status of a payment: the status of its charge, `paid` and `captured`.
        charge_status, paid, is_captured = {
            "succeeded": ("succeeded", True, True),
            "requires_capture": ("succeeded", True, False),  # a card was only authorized
            "processing": ("pending", False, True),  # a bank debit that is not confirmed yet
            "requires_payment_method": ("failed", False, False),  # a card was declined
        }[status]
        captured = (captured or amount) if is_captured else 0
        common = {"amount": amount, "currency": currency}
        intent, charge = self._new_id("pi"), self._new_id("ch")
        self.payments[intent] = common | {
            "id": intent,
            "object": "payment_intent",
            "amount_received": captured if paid else 0,
            "amount_capturable": amount if status == "requires_capture" else 0,
            "status": status,
            "latest_charge": charge,
            "metadata": {},
        }
        self.charges[charge] = common | {
            "id": charge,
            "object": "charge",
            "payment_intent": intent,
            "amount_captured": captured,
            "status": charge_status,
            "paid": paid,
            "captured": is_captured,
            "disputed": False,
        }
        if refunded:
            self._add_refund(self.charges[charge], refunded, {}, "succeeded")
        return intent

    def settle(self, refund_id: str, status: str) -> None:
        """Change the status of a refund, as a bank does later: pending to succeeded or failed,
        but also succeeded to failed."""
        if self.refunds[refund_id] not in self._live_refunds():
            raise ValueError("A failed or canceled refund keeps its status.")
        self.refunds[refund_id]["status"] = status

    def fail_next(
        self,
        error: StripeError,
        *,
        times: int = 1,
        endpoint: str = "refunds.create",
        acted: bool = False,
    ) -> None:
        """Answer the next `times` requests to `endpoint` with `error`. With `acted`, the refund is
        made first: the answer is lost, or is a 500."""
        # Not stored are the answers that come from in front of the idempotency layer: Stripe's
        # access checks and limits, a proxy (408), or a lost connection (None).
        stored = error.http_status not in {None, 401, 403, 408, 409, 429}
        self._faults[endpoint] += [Fault(error, acted, stored)] * times

    def hold_next_create(self, where: str) -> asyncio.Event:
        """Hold the next create until `release`: "before" the refund is made, or "after" that but
        before the answer. The event is set once the request is held."""
        self._released.clear()
        self._holds[where] = held = asyncio.Event()
        return held

    def release(self) -> None:
        self._released.set()

    def counts(self) -> Counter[str]:
        """The number of requests to each endpoint."""
        return Counter(call.endpoint for call in self.calls)

    # --- What the client calls -------------------------------------------------------------------

    async def _create_refund(self, params: Record, options: Record | None = None) -> Any:
        """A request that has arrived is carried out even if its caller hangs up."""
        return await asyncio.shield(self._carry_out_create(params, options or {}))

    async def _carry_out_create(self, params: Record, options: Record) -> Any:
        """The checks come in Stripe's order: the API key, faults in front of the idempotency
        layer, the idempotency key, the parameters, the charge. A refusal by the charge is stored
        for the key; the refusals before it are not."""
        given_key = options.get("idempotency_key")
        fault = self._receive("refunds.create", given_key)
        if fault and not fault.stored and not fault.acted:
            raise copy.copy(fault.error)
        # The SDK sends a random key if the caller gives none.
        key = given_key or self._new_id("key")
        request = json.dumps(params, sort_keys=True)
        if (answer := self._find_answer(key, request)) is None:
            self._check_parameters(params)
            self._running.add(key)
            try:
                await self._pause("before")
                answer = self._carry_out(params, fault)
                self._stored[key] = Stored(request, time.time(), answer)
            finally:
                self._running.remove(key)
            await asyncio.sleep(self.answer_delay_seconds)
            await self._pause("after")
        if fault and not fault.stored:
            answer = fault.error  # the caller does not see the answer, but it is stored
        if isinstance(answer, StripeError):
            raise copy.copy(answer)  # a copy, because an exception grows each time it is raised
        return answer

    async def _retrieve_refund(self, refund: str) -> Any:
        self._receive_read("refunds.retrieve")
        return stripe_object(_find(self.refunds, refund, "id"))

    async def _list_refunds(self, params: Record) -> Any:
        """A page of refunds, newest first."""
        self._receive_read("refunds.list")
        _refuse_unknown(params, {"payment_intent", "limit", "starting_after"})
        payment, after = params.get("payment_intent"), params.get("starting_after")
        newest_first = reversed(self.refunds.values())
        found = [r for r in newest_first if payment in (None, r["payment_intent"])]
        if after:
            found = found[found.index(_find(self.refunds, after, "starting_after")) + 1 :]
        limit = min(params.get("limit", 10), 100)  # Stripe's default and maximum
        page = {"object": "list", "data": found[:limit], "has_more": len(found) > limit}
        return stripe_object(page)

    async def _retrieve_payment(self, intent: str, params: Record | None = None) -> Any:
        self._receive_read("payment_intents.retrieve")
        payment = _find(self.payments, intent, "intent")
        charge = self.charges.get(payment["latest_charge"])
        if charge and "latest_charge" in (params or {}).get("expand", []):
            refunds = [r for r in self.refunds.values() if r["charge"] == charge["id"]]
            total = sum(r["amount"] for r in refunds if r["status"] == "succeeded")
            totals = {"amount_refunded": total, "refunded": total == charge["amount"]}
            payment = payment | {"latest_charge": charge | totals}
        return stripe_object(payment)

    # --- The steps of a request ------------------------------------------------------------------

    def _receive(self, endpoint: str, key: str | None = None) -> Fault | None:
        """Count the request and check the API key. Return the fault that waits for it."""
        self.calls.append(Call(endpoint, key))
        # The stand-in's own rule: a live key that is used here by mistake is refused.
        if not (self.api_key or "").startswith(("sk_test_", "rk_test_")):
            raise AuthenticationError("Use a test-mode key.", 401, "invalid_request_error")
        return self._faults[endpoint].pop(0) if self._faults[endpoint] else None

    def _receive_read(self, endpoint: str) -> None:
        """A read has no idempotency key, so an error is never stored."""
        if fault := self._receive(endpoint):
            raise copy.copy(fault.error)

    def _find_answer(self, key: str, request: str) -> Any:
        """The stored answer of this key, or None if the key is new."""
        if len(key) > 255:
            raise InvalidRequestError("An idempotency key has at most 255 characters.")
        if key in self._running:
            raise APIError(
                "Another request with this idempotency key is in progress.",
                409,
                "invalid_request_error",
                "idempotency_key_in_use",
            )
        stored = self._stored.get(key)
        if stored is None or time.time() - stored.at >= KEY_RETENTION_SECONDS:
            return None
        if stored.request != request:
            raise IdempotencyError(
                "This idempotency key was used with other parameters.", 400, "idempotency_error"
            )
        return stored.answer

    def _check_parameters(self, params: Record) -> None:
        """A request that is refused here leaves its idempotency key unused."""
        _refuse_unknown(params, {"payment_intent", "amount", "metadata"})
        _find(self.payments, params.get("payment_intent"), "payment_intent")
        amount = params.get("amount")
        if amount is not None and (type(amount) is not int or amount < 1):
            raise InvalidRequestError(
                f"Invalid integer: {amount}", code="parameter_invalid_integer", param="amount"
            )

    async def _pause(self, where: str) -> None:
        if held := self._holds.pop(where, None):
            held.set()
            await self._released.wait()

    def _carry_out(self, params: Record, fault: Fault | None) -> Any:
        """Make the refund. Return the answer that is stored for the key: a copy of the refund,
        which does not change when the refund does, or an error."""
        if fault and not fault.acted:
            return fault.error
        try:
            answer = stripe_object(self._refund(params))
        except InvalidRequestError as refused:
            return refused
        return fault.error if fault and fault.stored else answer

    def _refund(self, params: Record) -> Record:
        charge = self.charges.get(self.payments[params["payment_intent"]]["latest_charge"])
        if charge is None or charge["status"] != "succeeded" or not charge["captured"]:
            raise InvalidRequestError("This payment has no successful charge to refund.")
        live = [r["amount"] for r in self._live_refunds() if r["charge"] == charge["id"]]
        remaining = charge["amount_captured"] - sum(live)
        amount = params.get("amount") or remaining
        if not remaining:
            raise InvalidRequestError("It is already refunded.", code="charge_already_refunded")
        if charge["disputed"]:
            raise InvalidRequestError("The charge is disputed.", code="charge_disputed")
        if amount > remaining:
            raise InvalidRequestError(f"The charge has only {remaining} left.", param="amount")
        status = self.next_statuses.pop(0) if self.next_statuses else "succeeded"
        return self._add_refund(charge, amount, params.get("metadata", {}), status)

    def _live_refunds(self) -> list[Record]:
        """The money of a failed or canceled refund returns, so it can be refunded again."""
        return [r for r in self.refunds.values() if r["status"] not in ("failed", "canceled")]

    def _add_refund(self, charge: Record, amount: int, metadata: Record, status: str) -> Record:
        refund = {
            "id": self._new_id("re"),
            "object": "refund",
            "payment_intent": charge["payment_intent"],
            "charge": charge["id"],
            "amount": amount,
            "currency": charge["currency"],
            "status": status,
            "metadata": dict(metadata),
            "created": int(time.time()),
        }
        self.refunds[refund["id"]] = refund
        return refund

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{next(self._numbers):06d}"


# --- Small parts ---------------------------------------------------------------------------------


def stripe_object(value: Any) -> Any:
    """A copy of a record as the SDK returns it: its fields are attributes."""
    if isinstance(value, dict):
        return SimpleNamespace(**{name: stripe_object(field) for name, field in value.items()})
    if isinstance(value, list):
        return [stripe_object(item) for item in value]
    return value


def _find(records: dict[str, Record], id: Any, param: str) -> Record:
    if id not in records:
        raise InvalidRequestError(f"No such id: {id}", 404, code="resource_missing", param=param)
    return records[id]


def _refuse_unknown(params: Record, known: set[str]) -> None:
    for name in params.keys() - known:
        raise InvalidRequestError(
            f"Unknown parameter: {name}", code="parameter_unknown", param=name
        )

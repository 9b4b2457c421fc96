"""An in-memory Stripe with the call shape of `stripe.StripeClient`: refunds and payment intents.

The one rule: never more generous than Stripe. The sum of refunds never exceeds the charge, a key
given twice moves money once, and a call without a key is a new request every time.

Copied from the v1 API: the idempotency layer (order of checks, what is stored, what a replay looks
like), the refund life cycle, error classes and their attributes. Left out: everything else, and
networking: whoever wants the ledger to outlive a killed process keeps this object in another one.
The clock is `time.time()`, so a frozen clock is obeyed. Faults are driven from outside with
`fail_next`, `hold_next_create` and the public attributes below.

Source of the rules: the API reference (idempotent requests, errors, refunds) and stripe-python 16.
"""

import asyncio
import copy
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

KEY_RETENTION_SECONDS = 24 * 60 * 60  # Stripe may prune a key after this; a pruned key runs as new
MAX_KEY_LENGTH = 255
MAX_PAGE, DEFAULT_PAGE = 100, 10
REFUND_PARAMS = {"payment_intent", "charge", "amount", "reason", "metadata", "expand"}
REASONS = {"duplicate", "fraudulent", "requested_by_customer"}
DEAD = {"failed", "canceled"}  # these refunds do not count against what is left of the charge

Params = Mapping[str, Any]
Record = dict[str, Any]

# --- Errors: the SDK's class names and attributes ------------------------------------------------


class StripeError(Exception):
    """What every Stripe error carries. Branch on `http_status` and `error.code`.

    `code` is None on most classes even when `error.code` is set; that is the SDK's habit, kept here.
    """

    def __init__(
        self,
        message: str,
        *,
        http_status: int | None = None,
        type: str = "api_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        should_retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.user_message = message
        self.http_status = http_status
        self.error = SimpleNamespace(type=type, code=code, param=param, message=message)
        self.code: str | None = None
        self.param: str | None = None
        self.headers = dict(headers or {})
        self.request_id: str | None = None
        self.should_retry = should_retry


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
        *,
        http_status: int = 400,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        type = "invalid_request_error"
        super().__init__(message, http_status=http_status, type=type, code=code, param=param)
        self.code, self.param = self.error.code, self.error.param


def rate_limited() -> RateLimitError:
    return RateLimitError(
        "Too many requests.", http_status=429, type="invalid_request_error", code="rate_limit"
    )


def server_error() -> APIError:
    headers = {"Stripe-Should-Retry": "false"}
    return APIError("An unknown error occurred.", http_status=500, headers=headers)


def connection_lost() -> APIConnectionError:
    return APIConnectionError("Unexpected error communicating with Stripe.", should_retry=True)


def not_permitted() -> PermissionError:
    return PermissionError(
        "The provided key does not have the required permissions for this endpoint.",
        http_status=403,
        type="invalid_request_error",
    )


# --- What is kept --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One line of the call ledger: `endpoint` is `refunds.create`, `refunds.list`, …"""

    endpoint: str
    idempotency_key: str | None


@dataclass
class _Stored:
    """What an idempotency key is bound to; `outcome` is None while the first call is running."""

    path: str
    params: Record
    at: float
    request_id: str
    outcome: Record | StripeError | None = None


@dataclass
class _Fault:
    error: StripeError
    times: int
    endpoint: str
    acted: bool


@dataclass
class _Hold:
    """Stops the next create `before` Stripe acts, or `after` it acted and before it answers."""

    where: str
    reached: asyncio.Event = field(default_factory=asyncio.Event)


# --- The service ---------------------------------------------------------------------------------


class FakeStripe:
    """`FakeStripe("sk_test_...")` stands for the account and for a client of it.

    Only keys that start with `sk_test_` or `rk_test_` are accepted. This is the fake's own rule, so
    that a live key that strays in here is refused at the first call.
    """

    def __init__(self, api_key: str | None = "sk_test_fake") -> None:
        self.api_key = api_key
        self.payments: dict[str, Record] = {}
        self.charges: dict[str, Record] = {}
        self.refunds: dict[str, Record] = {}
        self.calls: list[Call] = []
        self.refund_statuses: list[str] = []  # statuses of the next refunds, default "succeeded"
        self.answer_delay_seconds = 0.0  # how long each create takes to answer
        self._keys: dict[str, _Stored] = {}
        self._faults: list[_Fault] = []
        self._hold: _Hold | None = None
        self._released = asyncio.Event()
        self._ids = itertools.count(1)
        self.v1 = SimpleNamespace(refunds=_Refunds(self), payment_intents=_PaymentIntents(self))

    def add_payment(
        self, amount: int, currency: str, *, status: str = "succeeded", refunded: int = 0
    ) -> str:
        """Put a card payment of `amount` minor units on the books; the id of its payment intent."""
        paid = status == "succeeded"
        charge_id, intent_id = (self._new_id("ch"), self._new_id("pi"))
        self.charges[charge_id] = {
            "id": charge_id, "object": "charge", "amount": amount, "amount_captured": amount,
            "amount_refunded": 0, "refunded": False, "disputed": False, "currency": currency,
            "status": "succeeded", "payment_intent": intent_id,
        }  # fmt: skip
        self.payments[intent_id] = {
            "id": intent_id, "object": "payment_intent", "amount": amount, "currency": currency,
            "amount_received": amount if paid else 0, "amount_capturable": 0, "status": status,
            "latest_charge": charge_id if paid else None, "metadata": {}, "livemode": False,
            "created": int(time.time()),
        }  # fmt: skip
        if refunded:
            self._refund(self.charges[charge_id], refunded, {}, None)
        return intent_id

    def refunds_of(self, payment_intent: str) -> list[Record]:
        """The refunds of one payment, newest first."""
        mine = [r for r in self.refunds.values() if r["payment_intent"] == payment_intent]
        return mine[::-1]

    def settle(self, refund_id: str, status: str, failure_reason: str | None = None) -> None:
        """Let a refund move on, as banks do later: pending to succeeded, succeeded to failed."""
        refund = self.refunds[refund_id]
        refund["status"] = status
        refund.pop("pending_reason", None)
        if status in DEAD:
            refund["failure_reason"] = failure_reason or "unknown"
            refund["failure_balance_transaction"] = self._new_id("txn")
        self._recount(self.charges[refund["charge"]])

    def fail_next(
        self,
        error: StripeError,
        *,
        times: int = 1,
        endpoint: str = "refunds.create",
        acted: bool = False,
    ) -> None:
        """Answer the next `times` calls of `endpoint` with `error`.

        With `acted` Stripe carries the request out first: a lost answer, or a 500 after the effect.
        """
        self._faults.append(_Fault(error, times, endpoint, acted))

    def hold_next_create(self, where: str) -> asyncio.Event:
        """Stop the next create `before` Stripe acts, or `after` it acted and before it answers, until
        `release` is called. The event says that it is held."""
        self._hold = _Hold(where)
        return self._hold.reached

    def release(self) -> None:
        self._released.set()

    # --- one request, in Stripe's order of checks ------------------------------------------------

    def _receive(self, endpoint: str, options: Params | None, *, post: bool) -> str:
        """Count the call and check the API key; the id of the new request."""
        key = (options or {}).get("idempotency_key") if post else None
        self.calls.append(Call(endpoint, key))
        if not (self.api_key or "").startswith(("sk_test_", "rk_test_")):
            message = "No test key (sk_test_..., rk_test_...) was given to the Stripe stand-in."
            raise AuthenticationError(message, http_status=401, type="invalid_request_error")
        return self._new_id("req")

    async def _post(
        self,
        endpoint: str,
        path: str,
        params: Params,
        options: Params | None,
        check: Callable[[], Callable[[], Record]],
    ) -> SimpleNamespace:
        """`check` validates and returns the effect; a refusal by the effect itself is stored."""
        request_id = self._receive(endpoint, options, post=True)
        fault = self._take_fault(endpoint)
        if fault and not fault.acted and fault.error.http_status in (401, 403, 409, 429, None):
            raise copy.copy(fault.error)  # answered in front of the idempotency layer: nothing is stored
        key = (options or {}).get("idempotency_key")
        if replay := self._known(key, path, params):
            return self._answer(replay, request_id, key, replayed=True)
        stored = _Stored(path, copy.deepcopy(dict(params)), time.time(), request_id)
        effect = check()
        if key is not None:
            self._keys[key] = stored
        await self._pause("before")
        stored.outcome = self._run(effect, fault)
        await self._pause("after")
        if fault and fault.acted:
            raise copy.copy(fault.error)
        return self._answer(stored, request_id, key, replayed=False)

    def _run(self, effect: Callable[[], Record], fault: _Fault | None) -> Record | StripeError:
        try:
            outcome: Record | StripeError = fault.error if fault and not fault.acted else effect()
        except InvalidRequestError as refused:
            return refused
        stored_instead = fault and fault.acted and fault.error.http_status is not None
        return fault.error if fault and stored_instead else copy.deepcopy(outcome)

    def _known(self, key: str | None, path: str, params: Params) -> _Stored | None:
        if key is None:
            return None
        if len(key) > MAX_KEY_LENGTH:
            raise InvalidRequestError("Idempotency keys may be up to 255 characters long.")
        stored = self._keys.get(key)
        if stored is None or time.time() - stored.at >= KEY_RETENTION_SECONDS:
            return None
        if stored.outcome is None:
            raise APIError(
                "There is currently another in-progress request using this idempotency key.",
                http_status=409,
                type="invalid_request_error",
                code="idempotency_key_in_use",
            )
        if (stored.path, stored.params) != (path, dict(params)):
            raise IdempotencyError(
                "Keys for idempotent requests can only be used with the same endpoint and the same "
                "parameters they were first used with.",
                http_status=400,
                type="idempotency_error",
            )
        return stored

    def _answer(
        self, stored: _Stored, request_id: str, key: str | None, *, replayed: bool
    ) -> SimpleNamespace:
        headers = {"Request-Id": request_id}
        if key is not None:
            headers |= {"Idempotency-Key": key, "Original-Request": stored.request_id}
        if replayed:
            headers["Idempotent-Replayed"] = "true"
        if isinstance(stored.outcome, StripeError):
            error = copy.copy(stored.outcome)
            error.headers, error.request_id = error.headers | headers, request_id
            raise error
        assert stored.outcome is not None
        return _object(stored.outcome, headers)

    async def _pause(self, where: str) -> None:
        if where == "after" and self.answer_delay_seconds:
            await asyncio.sleep(self.answer_delay_seconds)
        hold = self._hold
        if hold and hold.where == where:
            self._hold = None
            hold.reached.set()
            await self._released.wait()

    def _take_fault(self, endpoint: str) -> _Fault | None:
        for fault in self._faults:
            if fault.endpoint == endpoint:
                fault.times -= 1
                if fault.times == 0:
                    self._faults.remove(fault)
                return fault
        return None

    # --- the effect ------------------------------------------------------------------------------

    def _refund(
        self, charge: Record | None, amount: int | None, metadata: Params, reason: str | None
    ) -> Record:
        if charge is None:
            raise InvalidRequestError("This payment has no successful charge to refund.")
        left = self._left(charge)
        if left == 0:
            message = f"Charge {charge['id']} has already been refunded."
            raise InvalidRequestError(message, code="charge_already_refunded")
        if charge["disputed"]:
            message = f"Charge {charge['id']} has been charged back; cannot issue a refund."
            raise InvalidRequestError(message, code="charge_disputed")
        if amount is not None and amount > left:
            message = f"Refund amount ({amount}) is greater than what is left of the charge ({left})."
            raise InvalidRequestError(message, param="amount")
        status = self.refund_statuses.pop(0) if self.refund_statuses else "succeeded"
        refund: Record = {
            "id": self._new_id("re"), "object": "refund", "amount": amount or left,
            "currency": charge["currency"], "charge": charge["id"],
            "payment_intent": charge["payment_intent"], "reason": reason, "status": status,
            "metadata": dict(metadata), "created": int(time.time()),
            "balance_transaction": self._new_id("txn"),
        }  # fmt: skip
        if status == "pending":
            refund["pending_reason"] = "processing"
        self.refunds[refund["id"]] = refund
        if status in DEAD:
            self.settle(refund["id"], status)
        self._recount(charge)
        return refund

    def _left(self, charge: Record) -> int:
        mine = (r for r in self.refunds.values() if r["charge"] == charge["id"])
        return int(charge["amount"] - sum(r["amount"] for r in mine if r["status"] not in DEAD))

    def _recount(self, charge: Record) -> None:
        mine = (r for r in self.refunds.values() if r["charge"] == charge["id"])
        refunded = sum(r["amount"] for r in mine if r["status"] == "succeeded")
        charge["amount_refunded"], charge["refunded"] = refunded, refunded == charge["amount"]

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{next(self._ids):06d}"

    def counts(self) -> Counter[str]:
        """How often each endpoint was called."""
        return Counter(call.endpoint for call in self.calls)


class _Refunds:
    def __init__(self, stripe: FakeStripe) -> None:
        self._stripe = stripe

    async def create_async(self, params: Params, options: Params | None = None) -> SimpleNamespace:
        stripe = self._stripe

        def check() -> Callable[[], Record]:
            charge = self._charge(params)
            amount, reason = _checked(params)
            return lambda: stripe._refund(charge, amount, params.get("metadata", {}), reason)

        return await stripe._post("refunds.create", "/v1/refunds", params, options, check)

    async def cancel_async(
        self, refund: str, params: Params | None = None, options: Params | None = None
    ) -> SimpleNamespace:
        stripe = self._stripe

        def cancel() -> Record:
            if stripe.refunds[refund]["status"] not in ("pending", "requires_action"):
                raise InvalidRequestError("Only a refund that was not sent yet can be canceled.")
            stripe.settle(refund, "canceled", "merchant_request")
            return stripe.refunds[refund]

        def check() -> Callable[[], Record]:
            return cancel if refund in stripe.refunds else _missing("refund", "id")

        path = f"/v1/refunds/{refund}/cancel"
        return await stripe._post("refunds.cancel", path, params or {}, options, check)

    async def retrieve_async(
        self, refund: str, params: Params | None = None, options: Params | None = None
    ) -> SimpleNamespace:
        request_id = await _get(self._stripe, "refunds.retrieve", options)
        if refund not in self._stripe.refunds:
            _missing("refund", "id")
        return _object(self._stripe.refunds[refund], {"Request-Id": request_id})

    async def list_async(
        self, params: Params | None = None, options: Params | None = None
    ) -> SimpleNamespace:
        request_id = await _get(self._stripe, "refunds.list", options)
        wanted = dict(params or {})
        limit = min(int(wanted.pop("limit", DEFAULT_PAGE)), MAX_PAGE)
        after = wanted.pop("starting_after", None)
        found = [
            refund
            for refund in reversed(self._stripe.refunds.values())
            if all(refund[name] == value for name, value in wanted.items())
        ]
        if after is not None:
            found = found[[refund["id"] for refund in found].index(after) + 1 :]
        page = {"object": "list", "url": "/v1/refunds", "has_more": len(found) > limit}
        return _object(page | {"data": found[:limit]}, {"Request-Id": request_id})

    def _charge(self, params: Params) -> Record | None:
        """The charge to refund (None: the payment has none yet), or a refusal that is not stored."""
        stripe = self._stripe
        for name in params:
            if name not in REFUND_PARAMS:
                message = f"Received unknown parameter: {name}"
                raise InvalidRequestError(message, code="parameter_unknown", param=name)
        intent_id, charge_id = params.get("payment_intent"), params.get("charge")
        if intent_id is None and charge_id is None:
            raise InvalidRequestError("One of the following params should be provided: charge, "
                                      "payment_intent.")  # fmt: skip
        if intent_id is not None:
            if intent_id not in stripe.payments:
                _missing("payment_intent", "payment_intent")
            charge_id = stripe.payments[intent_id]["latest_charge"]
            if charge_id is None:
                return None
        if charge_id not in stripe.charges:
            _missing("charge", "charge")
        return stripe.charges[charge_id]


class _PaymentIntents:
    def __init__(self, stripe: FakeStripe) -> None:
        self._stripe = stripe

    async def retrieve_async(
        self, intent: str, params: Params | None = None, options: Params | None = None
    ) -> SimpleNamespace:
        request_id = await _get(self._stripe, "payment_intents.retrieve", options)
        if intent not in self._stripe.payments:
            _missing("payment_intent", "intent")
        record = dict(self._stripe.payments[intent])
        if "latest_charge" in (params or {}).get("expand", ()) and record["latest_charge"]:
            record["latest_charge"] = self._stripe.charges[record["latest_charge"]]
        return _object(record, {"Request-Id": request_id})


# --- Small parts ---------------------------------------------------------------------------------


async def _get(stripe: FakeStripe, endpoint: str, options: Params | None) -> str:
    """A read: counted and authenticated, never stored; a key given with it is ignored."""
    request_id = stripe._receive(endpoint, options, post=False)
    if fault := stripe._take_fault(endpoint):
        raise copy.copy(fault.error)
    return request_id


def _checked(params: Params) -> tuple[int | None, str | None]:
    amount, reason = params.get("amount"), params.get("reason")
    if amount is not None and (type(amount) is not int or amount < 1):
        message = f"Invalid integer: {amount}"
        raise InvalidRequestError(message, code="parameter_invalid_integer", param="amount")
    if reason is not None and reason not in REASONS:
        message = f"Invalid reason: must be one of {', '.join(sorted(REASONS))}"
        raise InvalidRequestError(message, param="reason")
    return amount, reason


def _missing(what: str, param: str) -> NoReturn:
    raise InvalidRequestError(
        f"No such {what}.", http_status=404, code="resource_missing", param=param
    )


def _object(record: Record, headers: Mapping[str, str]) -> SimpleNamespace:
    """A record as the SDK hands it out: attributes, a copy, and `last_response`."""
    result = _namespace(record)
    result.last_response = SimpleNamespace(
        code=200,
        headers=dict(headers),
        request_id=headers.get("Request-Id"),
        idempotency_key=headers.get("Idempotency-Key"),
    )
    assert isinstance(result, SimpleNamespace)
    return result


def _namespace(value: Any) -> Any:
    if isinstance(value, Mapping):
        return SimpleNamespace(**{name: _namespace(inner) for name, inner in value.items()})
    if isinstance(value, list):
        return [_namespace(inner) for inner in value]
    return value



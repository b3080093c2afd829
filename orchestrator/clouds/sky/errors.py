"""Classify SkyPilot's failures by their messages. Pure functions; imports no SkyPilot.

The exception's type is too coarse: every cloud's refusal is "resources unavailable". Only the request's log has
the cloud's own message, which distinguishes a capacity shortage from a quota.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from grpo_orch.policies.model.vocabulary import Refusal

DETAIL_CHARS = 240


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed call: the exception's type and message, those of each place tried, and the request's log."""

    kind: str
    message: str
    history: tuple[tuple[str, str], ...] = ()
    log: str = ""


HAS_LOG = "ResourcesUnavailableError"  # the clouds' messages are in the request's log
UNREACHABLE = frozenset(
    {
        "ApiServerConnectionError",
        "ClusterDoesNotExist",
        "ClusterNotUpError",
        "ClusterStatusFetchingError",
        "ConcurrentWorkerExhaustedError",
        "ExecutionPoolFullError",
        "ExecutionRetryableError",
        "FetchClusterInfoError",
        "KubeAPIUnreachableError",
        "NetworkError",
        "RequestCancelled",
        "RequestInterruptedError",
        "ServerTemporarilyUnavailableError",
        "SkyletUnavailableError",
    }
)
CONNECTION_LOST = frozenset(  # as the HTTP client raises it
    {
        "ChunkedEncodingError",
        "ConnectTimeout",
        "ConnectionError",
        "HTTPError",
        "ProtocolError",
        "ReadTimeout",
    }
)
FORBIDDEN = frozenset(
    {
        "APIVersionMismatchError",
        "ApiServerAuthenticationError",
        "CloudUserIdentityError",
        "ClusterOwnerIdentityMismatchError",
        "InvalidCloudConfigs",
        "InvalidCloudCredentials",
        "NoCloudAccessError",
        "NoWorkspaceAccessError",
        "PermissionDeniedError",
        "UserRequestRejectedByPolicy",
        "WorkspaceAmbiguousError",
    }
)
NOT_OFFERED = frozenset(
    {
        "KubernetesValidationError",
        "NotSupportedError",
        "ProvisionUnsupportedError",
        "ResourcesMismatchError",
    }
)
MALFORMED = frozenset({"InvalidClusterNameError", "InvalidSkyPilotConfigError", "TypeError", "ValueError"})
_CAPACITY_PATTERNS = (
    r"Insufficient\w*Capacity|SpotMaxPriceTooLow",  # AWS
    "ZONE_RESOURCE_POOL_EXHAUSTED|does not have enough resources available to fulfill",  # GCP
    "no more capacity in the zone|Insufficient reserved capacity",
    "UNSUPPORTED_OPERATION",  # preempted during creation
    r"AllocationFailed|Overconstrained(Zonal)?AllocationRequest|SkuNotAvailable",  # Azure
    r"nodes are available|Insufficient (nvidia\.com/gpu|cpu|memory|pods)",  # Kubernetes
    "insufficient-capacity",  # Lambda
)
_QUOTA_PATTERNS = (
    "MaxSpotInstanceCountExceeded|(Vcpu|Instance|Volume|Address|Vpc)LimitExceeded",  # AWS
    r"QUOTA_EXCEEDED|quotaExceeded|Quota '\w+' (exceeded|exhausted)|QuotaFailure",  # GCP
    "QuotaExceeded|exceeding approved .*quota",  # Azure
    "exceeded quota|Found no quota for",  # Kubernetes, SkyPilot itself
)
_CREDENTIALS_PATTERNS = (
    "UnauthorizedOperation|AuthFailure|AccessDenied|InvalidClientTokenId|UnrecognizedClientException",  # AWS
    "SignatureDoesNotMatch|ExpiredToken|RequestExpired|OptInRequired|PendingVerification",
    "NoCredentialsError|Unable to locate credentials",
    r"PERMISSION_DENIED|Required '[\w.]+' permission|Policy update access denied",  # GCP
    "DefaultCredentialsError",
    "AuthorizationFailed|ClientAuthenticationError|ReadOnlyDisabledSubscription",  # Azure
    "is forbidden: User|invalid cloud c(redentials|onfig)|not enabled",  # Kubernetes, SkyPilot itself
)
_BUSY_PATTERNS = (
    "RequestLimitExceeded|Throttling|RESOURCE_OPERATION_RATE_EXCEEDED|TooManyRequests|ServiceUnavailable",
    "Could not connect to the endpoint URL|Read timeout on endpoint URL|ENDPOINT_CONNECTION_ERROR",
    # two concurrent launches create the resources that all clusters of a user share
    r"Invalid(Permission|Group)\.Duplicate",
    # the API server restarted or is short of memory
    "Failed to get request|Failed to process response from SkyPilot API server|BrokenProcessPool",
)
# Capacity first: if one place has no capacity and another no quota, waiting helps.
_PATTERNS = (
    (re.compile("|".join(_CAPACITY_PATTERNS)), Refusal.NO_CAPACITY),
    (re.compile("|".join(_QUOTA_PATTERNS)), Refusal.QUOTA),
    (re.compile("|".join(_CREDENTIALS_PATTERNS)), Refusal.CREDENTIALS),
    (re.compile("|".join(_BUSY_PATTERNS)), None),
)
_CLOUD_MESSAGE = re.compile(r"An error occurred \([\w.]+\).*")
_LOG_PREFIX = re.compile(r"^[DIWE] \d\d-\d\d \S+ PID=\d+ \S+\] ")
_PASSWORD = re.compile(r"//[^/\s@]+@")
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

RETRIED = "retrying"
REMEDY = {
    Refusal.NO_CAPACITY: f"{RETRIED}; list more regions or machines in `resources.any_of` to find capacity sooner",
    Refusal.QUOTA: "request more quota from the cloud, or name another region or machine in `resources`",
    Refusal.CREDENTIALS: "run `grpo-orch doctor` and check the permissions of your cloud account",
    Refusal.UNKNOWN: f"{RETRIED}; see `sky logs --provision` and ~/.sky/api_server/server.log",
}
OTHER_MACHINE = "name another region or machine in `resources`; see `sky gpus list` and `grpo-orch doctor`"
CORRECT = "correct `resources` in run.yaml"


def classify(failure: Failure) -> CloudRefused | CloudUnavailable:
    """Return the error to raise for a failure: one line with the cloud's message and a remedy."""
    message = one_line(failure.message).rstrip(". ") or failure.kind
    if failure.kind in UNREACHABLE:
        return CloudUnavailable(f"{message}; {RETRIED}")
    if failure.kind in CONNECTION_LOST:
        return CloudUnavailable(
            f"lost the connection to SkyPilot's API server: {message}; {RETRIED}, see `sky api info`"
        )
    if failure.kind in FORBIDDEN:
        return _refused(Refusal.CREDENTIALS, message)
    if failure.kind in MALFORMED:
        return CloudRefused(Refusal.CREDENTIALS, f"{message}; {CORRECT}")
    if failure.kind in NOT_OFFERED:
        return CloudRefused(Refusal.QUOTA, f"{message}; {OTHER_MACHINE}")
    return _by_pattern(failure) or _unknown(failure, message)


def _by_pattern(failure: Failure) -> CloudRefused | CloudUnavailable | None:
    lines = _lines(failure)
    for pattern, refusal in _PATTERNS:
        for line in lines:
            if pattern.search(line):
                message = _cloud_message(line) or one_line(line)
                return CloudUnavailable(f"{message}; {RETRIED}") if refusal is None else _refused(refusal, message)
    return None


def _unknown(failure: Failure, message: str) -> CloudRefused:
    cloud_messages = [found for line in _lines(failure) if (found := _cloud_message(line))]
    if cloud_messages:
        return _refused(Refusal.UNKNOWN, cloud_messages[-1])
    if failure.kind != HAS_LOG:
        return _refused(Refusal.UNKNOWN, f"{failure.kind}: {message}")
    if failure.history:
        return _refused(Refusal.NO_CAPACITY, one_line(failure.history[-1][1]).rstrip(". "))
    return CloudRefused(Refusal.QUOTA, f"{message}; {OTHER_MACHINE}")


def _refused(refusal: Refusal, message: str) -> CloudRefused:
    return CloudRefused(refusal, f"{message}; {REMEDY[refusal]}")


def _lines(failure: Failure) -> list[str]:
    """Return all lines of the failure, the request's log first."""
    history = (f"{kind}: {message}" for kind, message in failure.history)
    texts: Iterable[str] = (failure.log, *history, failure.message)
    return [_LOG_PREFIX.sub("", COLOUR.sub("", line)) for text in texts for line in text.splitlines()]


def _cloud_message(line: str) -> str:
    found = _CLOUD_MESSAGE.search(line)
    return one_line(found[0]).rstrip(". ") if found else ""


def one_line(text: str) -> str:
    """Return the first non-empty line, shortened, without colours and passwords in URLs."""
    plain = _PASSWORD.sub("//", COLOUR.sub("", text))
    lines = (" ".join(line.split()) for line in plain.splitlines())
    line = next((line for line in lines if line), "")
    return line if len(line) <= DETAIL_CHARS else f"{line[:DETAIL_CHARS]}..."

"""What SkyPilot's failures mean to a run: pure functions of the messages; imports no SkyPilot.

An exception's type tells little: every cloud's refusal comes as "resources unavailable", and the cloud's own
message, which tells a lack of capacity from a quota, is in the request's log alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from policies.model.vocabulary import Refusal

DETAIL_CHARS = 240


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that failed: the exception's type and words, those of each place tried, the request's log."""

    kind: str
    message: str
    history: tuple[tuple[str, str], ...] = ()
    log: str = ""


HAS_LOG = "ResourcesUnavailableError"  # what clouds said is in the log of the request
AWAY = frozenset(
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
CUT_OFF = frozenset(  # by the HTTP client
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
_CAPACITY_WORDS = (
    # AWS
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientReservedInstanceCapacity",
    "InsufficientCapacity",
    "SpotMaxPriceTooLow",
    # GCP
    "ZONE_RESOURCE_POOL_EXHAUSTED",
    "does not have enough resources available to fulfill",
    "no more capacity in the zone",
    "Insufficient reserved capacity",
    "UNSUPPORTED_OPERATION",  # it was preempted while it was made
    # Azure
    "AllocationFailed",
    "OverconstrainedAllocationRequest",
    "OverconstrainedZonalAllocationRequest",
    "SkuNotAvailable",
    # Kubernetes, Lambda
    "nodes are available",
    r"Insufficient (nvidia\.com/gpu|cpu|memory|pods)",
    "insufficient-capacity",
)
_QUOTA_WORDS = (
    # AWS
    "MaxSpotInstanceCountExceeded",
    "VcpuLimitExceeded",
    "InstanceLimitExceeded",
    "VolumeLimitExceeded",
    "AddressLimitExceeded",
    "VpcLimitExceeded",
    # GCP
    "QUOTA_EXCEEDED",
    "quotaExceeded",
    r"Quota '\w+' (exceeded|exhausted)",
    "QuotaFailure",
    # Azure
    "QuotaExceeded",
    "exceeding approved .*quota",
    # Kubernetes, SkyPilot itself
    "exceeded quota",
    "Found no quota for",
)
_CREDENTIALS_WORDS = (
    # AWS
    "UnauthorizedOperation",
    "AuthFailure",
    "AccessDenied",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "RequestExpired",
    "NoCredentialsError",
    "Unable to locate credentials",
    "OptInRequired",
    "PendingVerification",
    # GCP
    "IAM_PERMISSION_DENIED",
    "PERMISSION_DENIED",
    r"Required '[\w.]+' permission",
    "Policy update access denied",
    "DefaultCredentialsError",
    # Azure, Kubernetes, SkyPilot itself
    "AuthorizationFailed",
    "ClientAuthenticationError",
    "ReadOnlyDisabledSubscription",
    "is forbidden: User",
    "invalid cloud c(redentials|onfig)",
    "not enabled",
)
_BUSY_WORDS = (
    "RequestLimitExceeded",
    "Throttling",
    "RESOURCE_OPERATION_RATE_EXCEEDED",
    "TooManyRequests",
    "ServiceUnavailable",
    "Could not connect to the endpoint URL",
    "Read timeout on endpoint URL",
    "ENDPOINT_CONNECTION_ERROR",
    # two launches that make what all of a user's clusters share, at the same time
    "InvalidPermission.Duplicate",
    "InvalidGroup.Duplicate",
    # the API server, restarted or short of memory
    "Failed to get request",
    "Failed to process response from SkyPilot API server",
    "BrokenProcessPool",
)
# In this order: where one place has no capacity and another no quota, waiting helps.
_WORDS = (
    (re.compile("|".join(_CAPACITY_WORDS)), Refusal.NO_CAPACITY),
    (re.compile("|".join(_QUOTA_WORDS)), Refusal.QUOTA),
    (re.compile("|".join(_CREDENTIALS_WORDS)), Refusal.CREDENTIALS),
    (re.compile("|".join(_BUSY_WORDS)), None),
)
_CLOUD_SAID = re.compile(r"An error occurred \([\w.]+\).*")
_LOGGED = re.compile(r"^[DIWE] \d\d-\d\d \S+ PID=\d+ \S+\] ")
_PASSWORD = re.compile(r"//[^/\s@]+@")
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

AGAIN = "it is tried again"
REMEDY = {
    Refusal.NO_CAPACITY: "it is asked for again; more regions or machines in `resources.any_of` find it sooner",
    Refusal.QUOTA: "ask the cloud for more quota, or name another region or machine in `resources`",
    Refusal.CREDENTIALS: "see `grpo-orch doctor` and the rights of your cloud account",
    Refusal.UNKNOWN: f"{AGAIN}; see `sky logs --provision` and ~/.sky/api_server/server.log",
}
OTHER_MACHINE = "name another region or machine in `resources`; see `sky gpus list` and `grpo-orch doctor`"
CORRECT = "correct `resources` in run.yaml"


def understand(failure: Failure) -> CloudRefused | CloudUnavailable:
    """What to raise for a failure: one line that says what the cloud said and what helps."""
    said = one_line(failure.message).rstrip(". ") or failure.kind
    if failure.kind in AWAY:
        return CloudUnavailable(f"{said}; {AGAIN}")
    if failure.kind in CUT_OFF:
        return CloudUnavailable(f"SkyPilot's API server broke off: {said}; {AGAIN}, see `sky api info`")
    if failure.kind in FORBIDDEN:
        return _refused(Refusal.CREDENTIALS, said)
    if failure.kind in MALFORMED:
        return CloudRefused(Refusal.CREDENTIALS, f"{said}; {CORRECT}")
    if failure.kind in NOT_OFFERED:
        return CloudRefused(Refusal.QUOTA, f"{said}; {OTHER_MACHINE}")
    return _by_words(failure) or _unknown(failure, said)


def _by_words(failure: Failure) -> CloudRefused | CloudUnavailable | None:
    lines = _lines(failure)
    for words, refusal in _WORDS:
        for line in lines:
            if words.search(line):
                said = _what_the_cloud_said(line) or one_line(line)
                return CloudUnavailable(f"{said}; {AGAIN}") if refusal is None else _refused(refusal, said)
    return None


def _unknown(failure: Failure, said: str) -> CloudRefused:
    told = [words for line in _lines(failure) if (words := _what_the_cloud_said(line))]
    if told:
        return _refused(Refusal.UNKNOWN, told[-1])
    if failure.kind != HAS_LOG:
        return _refused(Refusal.UNKNOWN, f"{failure.kind}: {said}")
    if failure.history:
        return _refused(Refusal.NO_CAPACITY, one_line(failure.history[-1][1]).rstrip(". "))
    return CloudRefused(Refusal.QUOTA, f"{said}; {OTHER_MACHINE}")


def _refused(refusal: Refusal, said: str) -> CloudRefused:
    return CloudRefused(refusal, f"{said}; {REMEDY[refusal]}")


def _lines(failure: Failure) -> list[str]:
    """Everything that was said, the cloud's own words first."""
    texts: Iterable[str] = (failure.log, *(f"{kind}: {words}" for kind, words in failure.history), failure.message)
    return [_LOGGED.sub("", COLOUR.sub("", line)) for text in texts for line in text.splitlines()]


def _what_the_cloud_said(line: str) -> str:
    found = _CLOUD_SAID.search(line)
    return one_line(found[0]).rstrip(". ") if found else ""


def one_line(text: str) -> str:
    """The first line that is not empty, shortened, without colours and a URL's password."""
    plain = _PASSWORD.sub("//", COLOUR.sub("", text))
    lines = (" ".join(line.split()) for line in plain.splitlines())
    line = next((line for line in lines if line), "")
    return line if len(line) <= DETAIL_CHARS else f"{line[:DETAIL_CHARS]}..."

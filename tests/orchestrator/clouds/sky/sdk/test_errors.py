"""What SkyPilot's failures become: real exceptions, and the words that clouds really use."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from orchestrator.clouds.sky.errors import DETAIL_CHARS, Failure, understand
from policies.model.vocabulary import Refusal

exceptions = pytest.importorskip(
    "sky.exceptions", reason="SkyPilot is not installed: pip install 'grpo-orch[sky]'"
)

LOGGED = "\x1b[2mW 11-21 16:04:13.934 PID=15791 instance.py:415]"
RUN_INSTANCES = "An error occurred ({code}) when calling the RunInstances operation: {words}"
AWS = (
    (
        "InsufficientInstanceCapacity",
        "We currently do not have sufficient p5.48xlarge capacity in the Availability Zone you requested "
        "(us-east-1b). Our system will be working on provisioning additional capacity.",
        Refusal.NO_CAPACITY,
    ),
    (
        "InsufficientInstanceCapacity",
        "There is no Spot capacity available that matches your request.",
        Refusal.NO_CAPACITY,
    ),
    ("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded", Refusal.QUOTA),
    (
        "VcpuLimitExceeded",
        "You have requested more vCPU capacity than your current vCPU limit of 0 allows for the instance bucket "
        "that the specified instance type belongs to.",
        Refusal.QUOTA,
    ),
    (
        "UnauthorizedOperation",
        "You are not authorized to perform this operation. User: arn:aws:iam::1:user/u is not authorized to "
        "perform: ec2:RunInstances on resource: arn:aws:ec2:us-east-1:1:instance/* with an explicit deny",
        Refusal.CREDENTIALS,
    ),
    ("AuthFailure", "AWS was not able to validate the provided access credentials", Refusal.CREDENTIALS),
    ("RequestExpired", "Request has expired.", Refusal.CREDENTIALS),
    (
        "OptInRequired",
        "You are not subscribed to this service. Please go to http://aws.amazon.com to subscribe.",
        Refusal.CREDENTIALS,
    ),
    ("InvalidAMIID.NotFound", "The image id '[ami-785db401]' does not exist", Refusal.UNKNOWN),
)
OTHERS = (
    # GCP
    (
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS: The zone 'projects/p/zones/us-central1-a' does not have "
        "enough resources available to fulfill the request.  '(resource type:compute)'.",
        Refusal.NO_CAPACITY,
    ),
    (
        "{'code': 8, 'message': 'There is no more capacity in the zone \"europe-west4-a\"; you can try in "
        "another zone where Cloud TPU Nodes are offered'}",
        Refusal.NO_CAPACITY,
    ),
    (
        "QUOTA_EXCEEDED: Quota 'PREEMPTIBLE_NVIDIA_H100_GPUS' exceeded.  Limit: 0.0 in region us-central1.",
        Refusal.QUOTA,
    ),
    ("Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 1.0 globally.", Refusal.QUOTA),
    (
        "<HttpError 403 when requesting https://compute.googleapis.com/compute/v1/projects/p/zones/us-central1-a/"
        "instances returned \"Required 'compute.instances.create' permission for 'projects/p'\">",
        Refusal.CREDENTIALS,
    ),
    ("IAM_PERMISSION_DENIED: Permission 'compute.instances.create' denied", Refusal.CREDENTIALS),
    # Azure
    (
        "(SkuNotAvailable) The requested VM size for resource 'Following SKUs have failed for Capacity "
        "Restrictions: Standard_ND96isr_H100_v5' is currently not available in location 'eastus'.",
        Refusal.NO_CAPACITY,
    ),
    (
        "(ZonalAllocationFailed) Allocation failed. We do not have sufficient capacity for the requested VM size "
        "in this zone.",
        Refusal.NO_CAPACITY,
    ),
    (
        "(OperationNotAllowed) Operation could not be completed as it results in exceeding approved "
        "LowPriorityCores quota.",
        Refusal.QUOTA,
    ),
    (
        "(AuthorizationFailed) The client 'c' with object id 'o' does not have authorization to perform action",
        Refusal.CREDENTIALS,
    ),
    # Kubernetes
    ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", Refusal.NO_CAPACITY),
    (
        'pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, used: 8, limited: 8',
        Refusal.QUOTA,
    ),
    (
        'pods is forbidden: User "u" cannot create resource "pods" in API group "" in the namespace "n"',
        Refusal.CREDENTIALS,
    ),
    # SkyPilot's own look before it asks
    (
        "Found no quota for p5.48xlarge spot instances in region us-east-1 in AWS. To request quotas, check the "
        "instruction: https://docs.skypilot.co/en/latest/cloud-setup/quota.html.",
        Refusal.QUOTA,
    ),
    ("Failed to provision on cloud AWS due to invalid cloud credentials: ...", Refusal.CREDENTIALS),
)


def failure(error: Exception, log: str = "") -> Failure:
    history = tuple((type(one).__name__, str(one)) for one in getattr(error, "failover_history", ()))
    return Failure(type(error).__name__, str(error), history, log)


def nowhere(*reasons: str) -> Any:
    """What a launch raises when every place that it tried refused."""
    history = [exceptions.ResourcesUnavailableError(reason) for reason in reasons]
    words = "\x1b[31mFailed to provision all possible launchable resources.\x1b[0m Relax the requirements"
    return exceptions.ResourcesUnavailableError(words, failover_history=history)


def refusal_of(told: Failure) -> Refusal:
    error = understand(told)
    assert isinstance(error, CloudRefused), error
    check_line(str(error))
    return error.refusal


def check_line(message: str) -> None:
    """One line, what happened and then what helps."""
    happened, _, remedy = message.partition("; ")
    assert happened
    assert remedy
    assert "\n" not in message
    assert "\x1b" not in message
    assert len(happened) < DETAIL_CHARS + 120


@pytest.mark.parametrize(("code", "words", "expected"), AWS)
def test_aws_tells_why_in_the_log_of_the_request(code: str, words: str, expected: Refusal) -> None:
    said = RUN_INSTANCES.format(code=code, words=words)
    log = f"{LOGGED} create_instances: Attempt failed with {said}\x1b[0m"
    told = failure(nowhere("Failed to acquire resources in us-east-1b for {AWS(p5.48xlarge[Spot])}. "), log)
    assert refusal_of(told) is expected
    assert str(understand(told)).startswith(f"An error occurred ({code})")


@pytest.mark.parametrize(("words", "expected"), OTHERS)
def test_others_tell_in_the_history_or_the_log(words: str, expected: Refusal) -> None:
    logged = failure(nowhere("Failed to acquire resources in all zones"), log=f"{LOGGED} {words}\x1b[0m")
    assert refusal_of(failure(nowhere(words))) is expected
    assert refusal_of(failure(exceptions.ResourcesUnavailableError(words))) is expected
    assert refusal_of(logged) is expected
    assert str(understand(logged)).startswith(words[:20])


def test_waiting_helps_when_one_place_of_several_has_no_capacity() -> None:
    quota = RUN_INSTANCES.format(code="MaxSpotInstanceCountExceeded", words="Max spot instance count exceeded")
    capacity = RUN_INSTANCES.format(
        code="InsufficientInstanceCapacity", words="We do not have sufficient capacity"
    )
    denied = RUN_INSTANCES.format(code="UnauthorizedOperation", words="You are not authorized")
    assert refusal_of(failure(nowhere("", ""), f"{denied}\n{quota}\n{capacity}")) is Refusal.NO_CAPACITY
    assert refusal_of(failure(nowhere("", ""), f"{denied}\n{quota}")) is Refusal.QUOTA


def test_refused_everywhere_without_a_reason_is_no_capacity() -> None:
    told = failure(nowhere("Failed to acquire resources in us-east-1b for {AWS(m6i.large[Spot], mem=8.0)}. "))
    assert refusal_of(told) is Refusal.NO_CAPACITY
    assert "us-east-1b" in str(understand(told))


def test_a_machine_that_no_cloud_has_is_for_the_user_to_change() -> None:
    words = "Catalog does not contain any instances satisfying the request: 1x AWS({'H200': 8})."
    told = failure(
        exceptions.ResourcesUnavailableError(words + "\nTo fix: relax or change the resource requirements.")
    )
    assert refusal_of(told) is Refusal.QUOTA
    assert "`resources`" in str(understand(told))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (exceptions.NoCloudAccessError("No cloud access is set up. Run: `sky check`"), Refusal.CREDENTIALS),
        (exceptions.InvalidCloudCredentials("expired"), Refusal.CREDENTIALS),
        (exceptions.CloudUserIdentityError("Failed to get AWS user."), Refusal.CREDENTIALS),
        (exceptions.ClusterOwnerIdentityMismatchError("owned by another"), Refusal.CREDENTIALS),
        (exceptions.PermissionDeniedError("workspace w is private"), Refusal.CREDENTIALS),
        (exceptions.APIVersionMismatchError("restart it"), Refusal.CREDENTIALS),
        (
            exceptions.ResourcesUnavailableError("Task 'n' requires gcp which is not enabled."),
            Refusal.CREDENTIALS,
        ),
        (
            ValueError("Invalid resources YAML: Instead of 'acelerators', did you mean 'accelerators'?"),
            Refusal.CREDENTIALS,
        ),
        (exceptions.InvalidClusterNameError('Cluster name "a b" is invalid'), Refusal.CREDENTIALS),
        (
            exceptions.ResourcesMismatchError("Requested resources do not match the existing cluster."),
            Refusal.QUOTA,
        ),
        (exceptions.NotSupportedError("Slurm does not support spot"), Refusal.QUOTA),
        (exceptions.ProvisionUnsupportedError("no ports there"), Refusal.QUOTA),
        (RuntimeError("Failed to SSH to 1.2.3.4 after timeout 600s"), Refusal.UNKNOWN),
        (exceptions.CommandError(255, "ls", "Failed to run ls", "Connection timed out"), Refusal.UNKNOWN),
        (exceptions.ClusterSetUpError("ray did not start"), Refusal.UNKNOWN),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_other_refusals(error: Exception, expected: Refusal) -> None:
    assert refusal_of(failure(error)) is expected


@pytest.mark.parametrize(
    "error",
    [
        exceptions.ApiServerConnectionError("http://127.0.0.1:46580"),
        exceptions.ServerTemporarilyUnavailableError("rolling update"),
        exceptions.RequestCancelled("Current 'sky.launch' request is cancelled by another process."),
        exceptions.RequestInterruptedError("Streaming interrupted. Please retry."),
        exceptions.KubeAPIUnreachableError("unreachable"),
        exceptions.ClusterStatusFetchingError("Failed to query AWS cluster"),
        exceptions.ClusterDoesNotExist("Cluster 'n' does not exist"),
        exceptions.ClusterNotUpError("Cluster 'n' is not up"),
        ConnectionError("('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))"),
        RuntimeError("Failed to get request 3f2a: 404 Not Found"),
        exceptions.CloudError("A process in the process pool was terminated", "concurrent", "BrokenProcessPool"),
        nowhere(RUN_INSTANCES.format(code="RequestLimitExceeded", words="Request limit exceeded.")),
        nowhere('Could not connect to the endpoint URL: "https://ec2.us-east-1.amazonaws.com/"'),
        RuntimeError(
            "An error occurred (InvalidPermission.Duplicate) when calling the AuthorizeSecurityGroupIngress "
            "operation: The specified rule already exists"
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_nothing_is_known_when_nobody_answers(error: Exception) -> None:
    told = understand(failure(error))
    assert isinstance(told, CloudUnavailable)
    check_line(str(told))


def test_a_password_in_the_api_servers_address_is_not_told() -> None:
    told = str(understand(failure(exceptions.ApiServerConnectionError("https://me:open-sesame@sky.example:8080"))))
    assert "sky.example" in told
    assert "sesame" not in told

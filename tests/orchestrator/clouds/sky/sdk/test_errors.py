"""What SkyPilot's failures become: real exceptions, and the words that clouds really use."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from grpo_orch.orchestrator.clouds.sky.errors import DETAIL_CHARS, Failure, classify
from grpo_orch.policies.model.vocabulary import Refusal

exceptions = pytest.importorskip(
    "sky.exceptions", reason="SkyPilot is not installed: pip install 'grpo-orch[sky]'"
)

LOGGED = "\x1b[2mW 11-21 16:04:13.934 PID=15791 instance.py:415]"
RUN_INSTANCES = "An error occurred ({code}) when calling the RunInstances operation: {words}"
# What clouds really say, in the log of a request or in its history.
AWS = """
no_capacity InsufficientInstanceCapacity: We currently do not have sufficient p5.48xlarge capacity in the Zone.
no_capacity InsufficientInstanceCapacity: There is no Spot capacity available that matches your request.
quota MaxSpotInstanceCountExceeded: Max spot instance count exceeded
quota VcpuLimitExceeded: You have requested more vCPU capacity than your current vCPU limit of 0 allows
credentials UnauthorizedOperation: You are not authorized to perform this operation.
credentials AuthFailure: AWS was not able to validate the provided access credentials
credentials RequestExpired: Request has expired.
credentials OptInRequired: You are not subscribed to this service. Please go to http://aws.amazon.com to subscribe.
unknown InvalidAMIID.NotFound: The image id '[ami-785db401]' does not exist
"""
OTHERS = """
no_capacity ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS: The zone 'z' does not have enough resources
no_capacity {'code': 8, 'message': 'There is no more capacity in the zone "europe-west4-a"'}
quota QUOTA_EXCEEDED: Quota 'PREEMPTIBLE_NVIDIA_H100_GPUS' exceeded.  Limit: 0.0 in region us-central1.
quota Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 1.0 globally.
credentials <HttpError 403 when requesting x returned "Required 'compute.instances.create' permission">
credentials IAM_PERMISSION_DENIED: Permission 'compute.instances.create' denied
no_capacity (SkuNotAvailable) The requested VM size is currently not available in location 'eastus'.
no_capacity (ZonalAllocationFailed) Allocation failed. We do not have sufficient capacity for the requested VM size
quota (OperationNotAllowed) It results in exceeding approved LowPriorityCores quota.
credentials (AuthorizationFailed) The client 'c' with object id 'o' does not have authorization to perform action
no_capacity 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.
quota pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, used: 8, limited: 8
credentials pods is forbidden: User "u" cannot create resource "pods" in API group "" in the namespace "n"
quota Found no quota for p5.48xlarge spot instances in region us-east-1 in AWS. To request quotas, check the
credentials Failed to provision on cloud AWS due to invalid cloud credentials: ...
"""


def rows(table: str) -> list[list[str]]:
    """Of each line, the refusal that it means and the words."""
    return [line.split(" ", 1) for line in table.strip().splitlines()]


def failure(error: Exception, log: str = "") -> Failure:
    history = tuple((type(one).__name__, str(one)) for one in getattr(error, "failover_history", ()))
    return Failure(type(error).__name__, str(error), history, log)


def nowhere(*reasons: str) -> Any:
    """What a launch raises when every place that it tried refused."""
    history = [exceptions.ResourcesUnavailableError(reason) for reason in reasons]
    words = "\x1b[31mFailed to provision all possible launchable resources.\x1b[0m Relax the requirements"
    return exceptions.ResourcesUnavailableError(words, failover_history=history)


def refusal_of(told: Failure) -> Refusal:
    error = classify(told)
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


@pytest.mark.parametrize(("expected", "told"), rows(AWS))
def test_aws_tells_why_in_the_log_of_the_request(expected: str, told: str) -> None:
    code, _, words = told.partition(": ")
    said = RUN_INSTANCES.format(code=code, words=words)
    log = f"{LOGGED} create_instances: Attempt failed with {said}\x1b[0m"
    refused = failure(nowhere("Failed to acquire resources in us-east-1b for {AWS(p5.48xlarge[Spot])}. "), log)
    assert refusal_of(refused) == expected
    assert str(classify(refused)).startswith(f"An error occurred ({code})")


@pytest.mark.parametrize(("expected", "words"), rows(OTHERS))
def test_others_tell_in_the_history_or_the_log(expected: str, words: str) -> None:
    logged = failure(nowhere("Failed to acquire resources in all zones"), log=f"{LOGGED} {words}\x1b[0m")
    assert refusal_of(failure(nowhere(words))) == expected
    assert refusal_of(failure(exceptions.ResourcesUnavailableError(words))) == expected
    assert refusal_of(logged) == expected
    assert str(classify(logged)).startswith(words[:20])


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
    assert "us-east-1b" in str(classify(told))


def test_a_machine_that_no_cloud_has_is_for_the_user_to_change() -> None:
    words = "Catalog does not contain any instances satisfying the request: 1x AWS({'H200': 8})."
    told = failure(
        exceptions.ResourcesUnavailableError(words + "\nTo fix: relax or change the resource requirements.")
    )
    assert refusal_of(told) is Refusal.QUOTA
    assert "`resources`" in str(classify(told))


OTHER_REFUSALS = {
    Refusal.CREDENTIALS: [
        exceptions.NoCloudAccessError("No cloud access is set up. Run: `sky check`"),
        exceptions.InvalidCloudCredentials("expired"),
        exceptions.CloudUserIdentityError("Failed to get AWS user."),
        exceptions.ClusterOwnerIdentityMismatchError("owned by another"),
        exceptions.PermissionDeniedError("workspace w is private"),
        exceptions.APIVersionMismatchError("restart it"),
        exceptions.ResourcesUnavailableError("Task 'n' requires gcp which is not enabled."),
        ValueError("Invalid resources YAML: Instead of 'acelerators', did you mean 'accelerators'?"),
        exceptions.InvalidClusterNameError('Cluster name "a b" is invalid'),
    ],
    Refusal.QUOTA: [
        exceptions.ResourcesMismatchError("Requested resources do not match the existing cluster."),
        exceptions.NotSupportedError("Slurm does not support spot"),
        exceptions.ProvisionUnsupportedError("no ports there"),
    ],
    Refusal.UNKNOWN: [
        RuntimeError("Failed to SSH to 1.2.3.4 after timeout 600s"),
        exceptions.CommandError(255, "ls", "Failed to run ls", "Connection timed out"),
        exceptions.ClusterSetUpError("ray did not start"),
    ],
}


@pytest.mark.parametrize(("expected", "error"), [(kind, one) for kind, of in OTHER_REFUSALS.items() for one in of])
def test_other_refusals(expected: Refusal, error: Exception) -> None:
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
    told = classify(failure(error))
    assert isinstance(told, CloudUnavailable)
    check_line(str(told))


def test_a_password_in_the_api_servers_address_is_not_told() -> None:
    told = str(classify(failure(exceptions.ApiServerConnectionError("https://me:open-sesame@sky.example:8080"))))
    assert "sky.example" in told
    assert "sesame" not in told

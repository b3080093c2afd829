"""Read a bucket's rules, which may keep deleted objects or delete needed ones.

Only for S3, through botocore: the libraries used here cannot read the rules of Google or Azure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from grpo_orch.checkpoint.store.backends import Options
from grpo_orch.checkpoint.store.backends.answers import one_line
from grpo_orch.checkpoint.store.backends.aws import aws_settings
from grpo_orch.checkpoint.store.errors import StoreError

TIMEOUT_S = 10.0
_SIZES = {"ObjectSizeGreaterThan", "ObjectSizeLessThan"}
_UNREADABLE = ("GLACIER", "DEEP_ARCHIVE")
# Error codes of a bucket without such a rule, or of a store without support for it.
_NO_RULE_CODES = {
    "NoSuchLifecycleConfiguration",
    "ObjectLockConfigurationNotFoundError",
    "NotImplemented",
    "MethodNotAllowed",
    "501",
    "405",
}


class RulesUnknown(StoreError):
    """The bucket's rules cannot be read: the store has no interface for it, or access is denied."""


@dataclass(frozen=True, slots=True)
class BucketRules:
    """The rules for the objects of one run.

    Attributes:
        versioned: old versions stay when an object is deleted or overwritten.
        versions_days: old versions are deleted after this many days; None: never.
        locked_days: objects and versions cannot be deleted for this many days; 0: no lock.
        expires_days: all objects are deleted after this many days; None: never.
        expires_on: all objects are deleted from this date on, as `2027-01-31`; None: no date.
        archived_days: objects move after this many days to a storage class that needs hours to read; None: never.
    """

    versioned: bool = False
    versions_days: int | None = None
    locked_days: int = 0
    expires_days: int | None = None
    expires_on: str | None = None
    archived_days: int | None = None


def rules_of(url: str, options: Options, client: Any = None) -> BucketRules:
    """Read the rules of a run's bucket. Raises RulesUnknown, StoreDenied, StoreUnusable.

    Args:
        url: the run's store.
        options: as for Store.
        client: botocore's, to read the rules; None: made from the options.
    """
    parts = urlsplit(url)
    if parts.scheme != "s3":
        raise RulesUnknown(f"the rules of a {parts.scheme}:// bucket cannot be read")
    client = client or _client(options)
    bucket, prefix = parts.netloc, parts.path.strip("/")
    versioning = _query(client.get_bucket_versioning, bucket)
    lifecycle = _query(client.get_bucket_lifecycle_configuration, bucket)
    lock = _query(client.get_object_lock_configuration, bucket).get("ObjectLockConfiguration", {})
    rules = [rule for rule in lifecycle.get("Rules", []) if _covers(rule, prefix)]
    for_all_sizes = [rule for rule in rules if not _limits(rule).keys() & _SIZES]
    version_days = [rule.get("NoncurrentVersionExpiration", {}).get("NoncurrentDays") for rule in for_all_sizes]
    object_days = [rule.get("Expiration", {}).get("Days") for rule in rules]
    dates = [rule.get("Expiration", {}).get("Date") for rule in rules]
    moves = [move for rule in rules for move in rule.get("Transitions", ())]
    archived = [move.get("Days", 0) for move in moves if move.get("StorageClass") in _UNREADABLE]
    retention = lock.get("Rule", {}).get("DefaultRetention", {})
    return BucketRules(
        versioned=versioning.get("Status") == "Enabled",
        versions_days=min((days for days in version_days if days is not None), default=None),
        locked_days=int(retention.get("Days", 0)) or 365 * int(retention.get("Years", 0)),
        expires_days=min((days for days in object_days if days is not None), default=None),
        expires_on=min((date.date().isoformat() for date in dates if date is not None), default=None),
        archived_days=min(archived, default=None),
    )


def _query(call: Callable[..., Mapping[str, Any]], bucket: str) -> Mapping[str, Any]:
    """Return the bucket's answer; empty if it has no such rule. Raises RulesUnknown."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call(Bucket=bucket)
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in _NO_RULE_CODES:
            return {}
        raise RulesUnknown(f"{error.operation_name} of the bucket {bucket!r} was refused: {code}") from None
    except BotoCoreError as error:
        raise RulesUnknown(one_line(str(error))) from None


def _covers(rule: Mapping[str, Any], prefix: str) -> bool:
    """Whether a lifecycle rule applies to objects of the run, or of a folder of it.

    Rules for tagged objects do not: a run's objects have no tags. Rules for large or small objects do: chunks are
    large, journal entries small.
    """
    limits = _limits(rule)
    if rule.get("Status") != "Enabled" or limits.keys() - _SIZES - {"Prefix"}:
        return False
    rule_prefix = str(limits.get("Prefix", rule.get("Prefix", ""))).strip("/")
    return not rule_prefix or f"{prefix}/".startswith(rule_prefix) or rule_prefix.startswith(f"{prefix}/")


def _limits(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    limits: Mapping[str, Any] = rule.get("Filter", {})
    combined: Mapping[str, Any] = limits.get("And", limits)
    return combined


def _client(options: Options) -> Any:
    from botocore.config import Config
    from botocore.session import Session

    settings, provider = aws_settings(options)
    settings |= provider() if provider else {}
    region = settings.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = settings.get("endpoint") or settings.get("endpoint_url") or os.environ.get("AWS_ENDPOINT")
    arguments = {
        "region_name": region or "us-east-1",
        "endpoint_url": endpoint,
        "aws_access_key_id": settings.get("access_key_id"),
        "aws_secret_access_key": settings.get("secret_access_key"),
        "aws_session_token": settings.get("token"),
    }
    config = Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries={"max_attempts": 1})
    return Session().create_client("s3", config=config, **arguments)

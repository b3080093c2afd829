"""What a bucket does with objects by itself: keeps those that are deleted, or deletes those that are kept.

S3 can be asked, through botocore, which s3fs brings. Google's and Azure's own answers to this are not in the
libraries that stores are reached with here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from checkpoint.store.backends import Options
from checkpoint.store.backends.answers import one_line
from checkpoint.store.backends.aws import aws_settings
from checkpoint.store.errors import StoreError

TIMEOUT_S = 10.0
_SIZES = {"ObjectSizeGreaterThan", "ObjectSizeLessThan"}
_UNREADABLE = ("GLACIER", "DEEP_ARCHIVE")
# What S3 answers where nobody has set such a rule, or where the store has no such thing.
_NONE = {
    "NoSuchLifecycleConfiguration",
    "ObjectLockConfigurationNotFoundError",
    "NotImplemented",
    "MethodNotAllowed",
    "501",
    "405",
}


class NotTold(StoreError):
    """The bucket's rules cannot be asked for, for want of a way or of a right; the message says which."""


@dataclass(frozen=True, slots=True)
class BucketRules:
    """What holds for the objects of one run.

    Attributes:
        versioned: what is deleted or written over stays.
        versions_days: after so many days that goes; None: never.
        locked_days: so long nobody can delete an object or a version; 0: no lock.
        expires_days: after so many days an object is deleted, whoever needs it; None: none is.
        expires_on: from that date on all objects are, as in `2027-01-31`; None: there is none.
        archived_days: after so many days an object goes where it cannot be read any more unless it is asked for
            hours before; None: none does.
    """

    versioned: bool = False
    versions_days: int | None = None
    locked_days: int = 0
    expires_days: int | None = None
    expires_on: str | None = None
    archived_days: int | None = None


def rules_of(url: str, options: Options) -> BucketRules:
    """Ask what the bucket of a run does by itself. Raises NotTold, StoreDenied, StoreUnusable.

    Args:
        url: the run's store.
        options: as they are given to Store.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("s3", "s3a"):
        raise NotTold(f"{parts.scheme}:// has no way to ask for it here")
    client = _client(options)
    bucket, prefix = parts.netloc, parts.path.strip("/")
    versioning = _ask(client.get_bucket_versioning, bucket)
    lifecycle = _ask(client.get_bucket_lifecycle_configuration, bucket)
    lock = _ask(client.get_object_lock_configuration, bucket).get("ObjectLockConfiguration", {})
    rules = [rule for rule in lifecycle.get("Rules", []) if _covers(rule, prefix)]
    whole = [rule for rule in rules if not _limits(rule).keys() & _SIZES]
    older = [rule.get("NoncurrentVersionExpiration", {}).get("NoncurrentDays") for rule in whole]
    younger = [rule.get("Expiration", {}).get("Days") for rule in rules]
    dates = [rule.get("Expiration", {}).get("Date") for rule in rules]
    moves = [move for rule in rules for move in rule.get("Transitions", ())]
    archived = [move.get("Days", 0) for move in moves if move.get("StorageClass") in _UNREADABLE]
    held = lock.get("Rule", {}).get("DefaultRetention", {})
    return BucketRules(
        versioned=versioning.get("Status") == "Enabled",
        versions_days=min((days for days in older if days is not None), default=None),
        locked_days=int(held.get("Days", 0)) or 365 * int(held.get("Years", 0)),
        expires_days=min((days for days in younger if days is not None), default=None),
        expires_on=min((date.date().isoformat() for date in dates if date is not None), default=None),
        archived_days=min(archived, default=None),
    )


def _ask(call: Callable[..., Mapping[str, Any]], bucket: str) -> Mapping[str, Any]:
    """What the bucket answers; nothing where it has no such rule. Raises NotTold."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call(Bucket=bucket)
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in _NONE:
            return {}
        raise NotTold(f"{error.operation_name} of the bucket {bucket!r} is refused: {code}") from None
    except BotoCoreError as error:
        raise NotTold(one_line(str(error))) from None


def _covers(rule: Mapping[str, Any], prefix: str) -> bool:
    """Whether a lifecycle rule is for objects of the run: all of them, or those below a folder of it.

    One that is for tagged objects alone is not, for no object here has tags. One for large or for small ones is:
    chunks are large, and the journal's entries small.
    """
    limits = _limits(rule)
    if rule.get("Status") != "Enabled" or limits.keys() - _SIZES - {"Prefix"}:
        return False
    begins = str(limits.get("Prefix", rule.get("Prefix", ""))).strip("/")
    return not begins or f"{prefix}/".startswith(begins) or begins.startswith(f"{prefix}/")


def _limits(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    limits: Mapping[str, Any] = rule.get("Filter", {})
    together: Mapping[str, Any] = limits.get("And", limits)
    return together


def _client(options: Options) -> Any:
    from botocore.config import Config
    from botocore.session import Session

    where, who, profile = _settings(dict(options))
    config = Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries={"max_attempts": 1})
    return Session(profile=profile).create_client("s3", config=config, **where, **who)


def _settings(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """Where the store is, who asks, and by which profile, from the options of either driver."""
    if options.pop("driver", "obstore") == "fsspec":
        place = {"endpoint_url": options.get("endpoint_url"), "region_name": "us-east-1"}
        keys = ("key", "secret", "token")
        profile = options.get("profile")
    else:
        options, provider = aws_settings(options)
        options |= provider() if provider else {}
        endpoint = options.get("endpoint") or options.get("endpoint_url") or os.environ.get("AWS_ENDPOINT")
        place = {"endpoint_url": endpoint, "region_name": options.get("region") or os.environ.get("AWS_REGION")}
        keys = ("access_key_id", "secret_access_key", "token")
        profile = None
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    who = {name: options[key] for name, key in zip(names, keys, strict=True) if options.get(key)}
    place["region_name"] = place["region_name"] or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return {key: value for key, value in place.items() if value}, who, profile

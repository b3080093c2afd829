"""S3's endpoint, region and credentials, as AWS's own tools find them, and the rules of a bucket.

Options come first, then the environment, then `~/.aws`. obstore reads options and environment itself; botocore,
imported only if needed, reads profiles and rules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_orch.checkpoint.store.backends import Options, one_line
from grpo_orch.checkpoint.store.errors import StoreDenied, StoreError, StoreUnusable

Provider = Callable[[], dict[str, Any]]

_ENDPOINT = ("endpoint", "endpoint_url", "endpoint_url_s3")
_ENDPOINT_ENV = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_REGION = ("region", "default_region")
_REGION_ENV = ("AWS_REGION", "AWS_DEFAULT_REGION")
_CREDENTIALS = ("access_key_id", "skip_signature", "web_identity_token_file")
_CREDENTIALS_ENV = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_IN_PROFILE = (
    "aws_access_key_id",
    "role_arn",
    "sso_session",
    "sso_start_url",
    "credential_process",
    "login_session",
)

# botocore renews credentials 15 minutes before they expire. Each call reads the files again, since another tool
# may have changed them.
_TTL = timedelta(minutes=5)


def aws_settings(options: Options) -> tuple[dict[str, Any], Provider | None]:
    """Return the options for obstore's S3Store, and a provider of credentials if none are set otherwise.

    Payloads are signed only if the options or the environment request it: signing nearly halves the speed, and
    reads are verified by BLAKE3 digests. An http:// endpoint allows http.

    Raises:
        StoreUnusable: the profile does not exist.
        StoreDenied: the profile that the options name has no credentials.
    """
    config = {key.lower().removeprefix("aws_"): value for key, value in options.items()}
    name = config.pop("profile", None)
    provider = None
    if profile := _profile(name):
        if not _first_set(config, _REGION, _REGION_ENV) and "region" in profile:
            config["region"] = profile["region"]
        if not _first_set(config, _ENDPOINT, _ENDPOINT_ENV) and "endpoint_url" in profile:
            config["endpoint"] = profile["endpoint_url"]
        if name or not _first_set(config, _CREDENTIALS, _CREDENTIALS_ENV):
            provider = _provider(name) if any(key in profile for key in _IN_PROFILE) else None
    if name and provider is None:
        raise StoreDenied(f"AWS profile {name!r} has no credentials", "add them to ~/.aws/credentials")
    if "unsigned_payload" not in config and "AWS_UNSIGNED_PAYLOAD" not in os.environ:
        config["unsigned_payload"] = "true"
    if str(_first_set(config, _ENDPOINT, _ENDPOINT_ENV) or "").startswith("http://"):
        config.setdefault("allow_http", "true")
    return config, provider


def endpoint_and_region(options: Options) -> tuple[str, str]:
    """Return the store's endpoint and region; empty if not set. Raises as `aws_settings`."""
    settings, _ = aws_settings(options)
    endpoint = _first_set(settings, _ENDPOINT, _ENDPOINT_ENV)
    return str(endpoint or ""), str(_first_set(settings, _REGION, _REGION_ENV) or "")


def _first_set(config: Mapping[str, Any], keys: tuple[str, ...], variables: tuple[str, ...]) -> Any:
    """Return the first of these in the options, or else in the environment."""
    return next((config[key] for key in keys if key in config), None) or next(
        (os.environ[name] for name in variables if os.environ.get(name)), None
    )


def _profile(name: str | None) -> Mapping[str, Any]:
    """Return the AWS profile `name`, or that of AWS_PROFILE, or the default one; empty if there is none."""
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    wanted = name or os.environ.get("AWS_PROFILE")
    if not wanted and not any(Path(file).expanduser().exists() for file in files):
        return {}
    from botocore.exceptions import BotoCoreError

    try:
        return dict(_session(name).get_scoped_config())
    except BotoCoreError as error:
        raise StoreUnusable(f"AWS profile {wanted or 'default'!r}: {error}", "check ~/.aws/config") from error


def _provider(name: str | None) -> Provider:
    def credentials() -> dict[str, Any]:
        found = _session(name).get_credentials()
        if found is None:
            raise ValueError(
                f"AWS profile {name or os.environ.get('AWS_PROFILE', 'default')!r} has no credentials"
            )
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _TTL,
        }

    return credentials


def _session(name: str | None) -> Any:
    from botocore.session import Session

    return Session(profile=name)


# A bucket's rules, which may keep deleted objects or delete needed ones. Only of S3: the libraries used here
# cannot read the rules of Google or Azure.

TIMEOUT_S = 10.0
_UNREADABLE = ("GLACIER", "DEEP_ARCHIVE")
# Error codes of a bucket without such a rule, or of a store without support for it.
_NO_RULE_CODES = {"NoSuchLifecycleConfiguration", "NotImplemented", "MethodNotAllowed", "501", "405"}


class RulesUnknown(StoreError):
    """The bucket's rules cannot be read: the store has no interface for it, or access is denied."""


@dataclass(frozen=True, slots=True)
class BucketRules:
    """The rules for the objects of one run.

    Attributes:
        versioned: old versions stay when an object is deleted or overwritten.
        versions_days: old versions are deleted after this many days; None: never.
        removing: names of lifecycle rules that delete objects, or make them unreadable by archiving them.
    """

    versioned: bool = False
    versions_days: int | None = None
    removing: tuple[str, ...] = ()


def rules_of(url: str, options: Options) -> BucketRules:
    """Read the rules of a run's bucket. Raises RulesUnknown, StoreDenied, StoreUnusable.

    Args:
        url: the run's store.
        options: as for Store.
    """
    parts = urlsplit(url)
    if parts.scheme != "s3":
        raise RulesUnknown(f"the rules of a {parts.scheme}:// bucket cannot be read")
    client = _client(options)
    bucket, prefix = parts.netloc, parts.path.strip("/")
    versioning = _query(client.get_bucket_versioning, bucket)
    lifecycle = _query(client.get_bucket_lifecycle_configuration, bucket)
    rules = [rule for rule in lifecycle.get("Rules", []) if _covers(rule, prefix)]
    version_days = [rule.get("NoncurrentVersionExpiration", {}).get("NoncurrentDays") for rule in rules]
    return BucketRules(
        versioned=versioning.get("Status") == "Enabled",
        versions_days=min((days for days in version_days if days is not None), default=None),
        removing=tuple(str(rule.get("ID", "")) for rule in rules if _removes(rule)),
    )


def _removes(rule: Mapping[str, Any]) -> bool:
    """Whether a lifecycle rule deletes objects, or moves them to a storage class that needs hours to read."""
    moves = {move.get("StorageClass") for move in rule.get("Transitions", ())}
    return bool(rule.get("Expiration", {}).keys() & {"Days", "Date"}) or not moves.isdisjoint(_UNREADABLE)


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
    if rule.get("Status") != "Enabled" or limits.keys() - {
        "Prefix",
        "ObjectSizeGreaterThan",
        "ObjectSizeLessThan",
    }:
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
    endpoint, region = endpoint_and_region(options)
    arguments = {
        "region_name": region or "us-east-1",
        "endpoint_url": endpoint or None,
        "aws_access_key_id": settings.get("access_key_id"),
        "aws_secret_access_key": settings.get("secret_access_key"),
        "aws_session_token": settings.get("token"),
    }
    config = Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries={"max_attempts": 1})
    return Session().create_client("s3", config=config, **arguments)

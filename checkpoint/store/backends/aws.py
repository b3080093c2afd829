"""Find S3's endpoint, region and credentials as AWS's own tools do: options, environment, then `~/.aws`.

obstore reads options and environment itself; botocore, imported only if needed, reads profiles.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from grpo_orch.checkpoint.store.backends import Options
from grpo_orch.checkpoint.store.errors import StoreDenied, StoreUnusable

Provider = Callable[[], dict[str, Any]]

_ENDPOINT = ("endpoint", "endpoint_url", "endpoint_url_s3")
_ENDPOINT_ENV = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_REGION = ("region", "default_region")
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
        if not _first_set(config, _REGION, ("AWS_REGION", "AWS_DEFAULT_REGION")) and "region" in profile:
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

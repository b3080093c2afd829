"""Where S3 is and with which credentials, found as AWS's own tools do: options, environment, then `~/.aws`.

obstore reads options and environment itself. Profiles are read by botocore, imported only if there are any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from checkpoint.store.backends import Options
from checkpoint.store.errors import StoreDenied, StoreUnusable

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

# botocore renews credentials that have less than 15 minutes left. Each call reads the files again, to see those
# that another tool wrote.
_TTL = timedelta(minutes=5)


def aws_settings(options: Options) -> tuple[dict[str, Any], Provider | None]:
    """The options for obstore's S3Store, and what provides its credentials if options and environment do not.

    Payloads are signed only if the options or the environment say so: whatever is read back is checked against
    BLAKE3 digests, and signing nearly halves the speed. An http:// endpoint allows http.

    Raises:
        StoreUnusable: there is no such profile.
        StoreDenied: the profile that the options name has no credentials.
    """
    config = {key.lower().removeprefix("aws_"): value for key, value in options.items()}
    asked = config.pop("profile", None)
    provider = None
    if profile := _profile(asked):
        if not _named(config, _REGION, ("AWS_REGION", "AWS_DEFAULT_REGION")) and "region" in profile:
            config["region"] = profile["region"]
        if not _named(config, _ENDPOINT, _ENDPOINT_ENV) and "endpoint_url" in profile:
            config["endpoint"] = profile["endpoint_url"]
        if asked or not _named(config, _CREDENTIALS, _CREDENTIALS_ENV):
            provider = _provider(asked) if any(key in profile for key in _IN_PROFILE) else None
    if asked and provider is None:
        raise StoreDenied(f"AWS profile {asked!r} has no credentials", "add them to ~/.aws/credentials")
    if "unsigned_payload" not in config and "AWS_UNSIGNED_PAYLOAD" not in os.environ:
        config["unsigned_payload"] = "true"
    if str(_named(config, _ENDPOINT, _ENDPOINT_ENV) or "").startswith("http://"):
        config.setdefault("allow_http", "true")
    return config, provider


def _named(config: Mapping[str, Any], keys: tuple[str, ...], variables: tuple[str, ...]) -> Any:
    """The first of these in the options, or else in the environment."""
    return next((config[key] for key in keys if key in config), None) or next(
        (os.environ[name] for name in variables if os.environ.get(name)), None
    )


def _profile(asked: str | None) -> Mapping[str, Any]:
    """The AWS profile `asked` for, named by AWS_PROFILE, or the default one; empty if there is none."""
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    wanted = asked or os.environ.get("AWS_PROFILE")
    if not wanted and not any(Path(file).expanduser().exists() for file in files):
        return {}
    from botocore.exceptions import BotoCoreError

    try:
        return dict(_session(asked).get_scoped_config())
    except BotoCoreError as error:
        raise StoreUnusable(f"AWS profile {wanted or 'default'!r}: {error}", "see ~/.aws/config") from error


def _provider(asked: str | None) -> Provider:
    def credentials() -> dict[str, Any]:
        found = _session(asked).get_credentials()
        if found is None:
            raise ValueError(
                f"AWS profile {asked or os.environ.get('AWS_PROFILE', 'default')!r} has no credentials"
            )
        now = found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + _TTL,
        }

    return credentials


def _session(asked: str | None) -> Any:
    from botocore.session import Session

    return Session(profile=asked)

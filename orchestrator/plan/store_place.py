"""At which provider and in which region a run's store is, as far as its URL and options tell."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from checkpoint.store.run_store import Store
from policies.fleet.store_costs import Place

_CLOUDS = {"gs": "gcp", "az": "azure", "file": "local", "memory": "local", "sim": "aws"}
_ENDPOINT = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url")
_REGION = ("region", "default_region", "aws_region", "aws_default_region")
_AWS_HOST = re.compile(r"s3[.-]([a-z]{2}(?:-[a-z]+)+-\d)\.amazonaws\.com")


def store_place(store: Store) -> Place:
    """Return where the store is; empty words for what is not known."""
    scheme = store.url.partition("://")[0]
    if scheme not in ("s3", "s3a"):
        return Place(_CLOUDS.get(scheme, ""))
    options = {str(key).lower(): str(value) for key, value in store.options.items()}
    environment = {key.lower(): value for key, value in os.environ.items() if key.startswith("AWS_")}
    endpoint, region = _first(_ENDPOINT, options, environment), _first(_REGION, options, environment)
    if "r2.cloudflarestorage.com" in endpoint:
        return Place("r2")
    if endpoint and "amazonaws.com" not in endpoint:
        return Place("")
    found = _AWS_HOST.search(endpoint)
    return Place("aws", found[1] if found else region)


def _first(names: tuple[str, ...], *maps: Mapping[str, str]) -> str:
    return next((one[name] for one in maps for name in names if one.get(name)), "")

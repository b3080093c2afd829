"""Which clouds' credentials stay at home: SkyPilot puts those of every cloud that it finds on each machine."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

# Those whose `remote_identity` SkyPilot's settings have. Files of others go along, and no setting keeps them.
SETTABLE = frozenset({"aws", "azure", "gcp", "kubernetes", "nebius", "oci", "slurm", "ssh", "vast"})
_SAME_FILE = frozenset({"kubernetes", "ssh"})  # both ship the kubeconfig
_OF_STORE = {"s3": "aws", "gs": "gcp", "az": "azure"}


def unused_clouds(places: Iterable[str | None], store_url: str) -> list[str]:
    """The clouds that a run neither has machines on nor its store at; none where that cannot be told.

    Args:
        places: where its machines may be, as in `aws/us-east-1`; None: anywhere.
        store_url: as in `s3://bucket/run`.
    """
    named = {(place or "*").partition("/")[0].lower() for place in places}
    store = _OF_STORE.get(urlsplit(store_url).scheme)
    if "*" in named or store is None:
        return []
    used = named | {store} | (_SAME_FILE if named & _SAME_FILE else frozenset())
    return sorted(SETTABLE - used)

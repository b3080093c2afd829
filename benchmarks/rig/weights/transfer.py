"""One transfer in a process of its own, so that its memory can be told: `... transfer SIDE DIRECTION URL FILE`.

SIDE is `ours`, or a plain client of the same store: `obstore` (multipart, unsigned, its own parallelism), `boto3`
(multipart). DIRECTION is `up` or `down`. Prints seconds and the peak of resident memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV, Store
from grpo_orch.checkpoint.stream import manifest, transfer
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.policies.model.vocabulary import PolicyVersion

AT = PolicyVersion(0, 1)
PART_BYTES = 16 * 1024 * 1024  # for the plain clients: what was fastest of 5, 8, 16 and 32 MiB


def ours(direction: str, url: str, file: Path) -> None:
    store = Store(url)
    catalog = Catalog(store, "benchmark")
    if direction == "up":
        transfer.upload(store, catalog, [(file.name, file)], AT, time.time(), {})
        return
    found = transfer.read_manifest(store, catalog.newest().find(AT))
    manifest.materialize(store, found.root, found.files, file.parent / "restored")


def plain_obstore(direction: str, url: str, file: Path) -> None:
    import obstore
    from obstore.store import S3Store

    parts = urlparse(url)
    given: Any = json.loads(os.environ[OPTIONS_ENV])
    store = S3Store(
        parts.netloc, prefix=parts.path, **given, unsigned_payload=True, client_options={"allow_http": True}
    )
    if direction == "up":
        obstore.put(store, file.name, file, chunk_size=PART_BYTES, max_concurrency=8)
        return
    with file.with_name("plain").open("wb") as out:
        for piece in obstore.get(store, file.name).stream(min_chunk_size=PART_BYTES):
            out.write(piece)


def boto3(direction: str, url: str, file: Path) -> None:
    import boto3 as sdk
    from boto3.s3.transfer import TransferConfig

    parts = urlparse(url)
    given: Any = json.loads(os.environ[OPTIONS_ENV])
    client = sdk.client(
        "s3",
        endpoint_url=given["endpoint"],
        region_name=given["region"],
        aws_access_key_id=given["access_key_id"],
        aws_secret_access_key=given["secret_access_key"],
    )
    config = TransferConfig(multipart_chunksize=PART_BYTES, max_concurrency=8)
    key = f"{parts.path.strip('/')}/{file.name}"
    if direction == "up":
        client.upload_file(str(file), parts.netloc, key, Config=config)
    else:
        client.download_file(parts.netloc, key, str(file.with_name("plain")), Config=config)


SIDES = {"ours": ours, "obstore": plain_obstore, "boto3": boto3}


def peak_rss_mib(pid: int | str) -> float:
    """A process's peak of resident memory; getrusage would count its parent's as well."""
    lines = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024


def main() -> None:
    side, direction, url, file = sys.argv[1:]
    begun_s = time.perf_counter()
    SIDES[side](direction, url, Path(file))
    seconds = time.perf_counter() - begun_s
    print(json.dumps({"seconds": seconds, "rss_mib": peak_rss_mib("self")}))


if __name__ == "__main__":
    main()

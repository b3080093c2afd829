"""Publish the trainer's weights to the store as policy versions that rollout nodes can pull and verify."""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound, StoreError, StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import chunks, manifest
from grpo_orch.checkpoint.stream.chunks import ChunkUpload
from grpo_orch.checkpoint.stream.manifest import Manifest
from grpo_orch.checkpoint.weights import delta, safetensors, scratch
from grpo_orch.checkpoint.weights.safetensors import Bytes
from grpo_orch.checkpoint.weights.scratch import Written
from grpo_orch.policies.model.vocabulary import PolicyVersion, Precedence
from grpo_orch.policies.serving.canary import Canary
from grpo_orch.policies.serving.wire import PolicyRef, labelled_version
from grpo_orch.policies.weights.tensors import ServedTypes, Tensor
from grpo_orch.tasks.storing.published_policies import PolicyRemover, Published, find, newest_first
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.storing.tensors import TYPES, LazyTensor, type_name

log = structlog.get_logger()

# A snapshot stores all weights of a policy while its successors are published, so that no step waits.
#
# The file of weights is overwritten meanwhile, so a chunk may mix this policy with later ones: a fuzzy snapshot,
# as in databases. Deltas contain new values, not differences. A node that applies all deltas after this policy, up
# to a policy published after the last chunk was read, therefore has that policy's weights; the digest proves it.

TRANSFERS = 4  # concurrent, each with a chunk in memory: 65 GB in 3 minutes at 90 MB/s each from S3


class SnapshotStopped(Exception):
    """The snapshot is no longer needed, or the process ends."""


class Snapshot:
    """Stores the weights in a file as of policy `of` or a later one.

    Args:
        of: the policy that the file holds now.
        idle: set while no policy is being published; publications take precedence.
    """

    def __init__(self, store: Store, of: PolicyRef, weights: Path, idle: threading.Event) -> None:
        self.of = of
        self._store = store
        self._weights = weights
        self._idle = idle
        self._size_bytes = weights.stat().st_size
        self._stopped = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self.stored: Future[Manifest] = self._pool.submit(self._run)

    def stop(self) -> None:
        """Stop sending: deltas no longer build on these weights."""
        self._stopped = True
        self._pool.shutdown(wait=False)

    def _run(self) -> Manifest:
        """Store the file. Raises SnapshotStopped, StoreError (Corrupt if the file was truncated), OSError."""
        with ChunkUpload(
            self._store, self.of.prefix, stored={}, content=self._content, transfers=TRANSFERS
        ) as sending:
            files = sending.finish([(layout.MODEL, self._weights)])
        meta = {manifest.KIND: manifest.FUZZY, manifest.WEIGHTS: self.of.digest}
        version = labelled_version(self.of.label)
        return manifest.publish_once(
            self._store, self.of.prefix, files, version, time.time(), meta, layout.SNAPSHOT
        )

    @contextmanager
    def _content(self, path: Path, offset: int) -> Iterator[memoryview]:
        """Yield a copy of a chunk, since the file may change while it is hashed and sent."""
        while not self._idle.wait(timeout=1.0):
            self._check_stopped()
        self._check_stopped()
        with path.open("rb") as file:
            size_bytes = min(chunks.CHUNK_BYTES, self._size_bytes - offset)  # Corrupt if the file is shorter now
            yield safetensors.read(file.fileno(), offset, size_bytes).data

    def _check_stopped(self) -> None:
        # An exiting process waits for its pools' threads, so this thread ends at the next chunk.
        if self._stopped or not threading.main_thread().is_alive():
            raise SnapshotStopped


# Maximum chain of deltas after a whole policy, in number and as a share of its size. A joining node then fetches
# about 1.5 times the weights and reads few manifests, and whole policies take about as much of the trainer's
# bandwidth as deltas do. Beyond these limits a snapshot is stored in the background; at twice these limits, if the
# store is too slow, the next policy is whole and its step waits.
CHAIN_MAX = 32
CHAIN_SHARE = 0.5
# Publications without a comparison after one in which almost all values changed, as at high learning rates.
UNCOMPARED = 8

OF_TYPE = {name: dtype for dtype, name in TYPES.items()}


class PolicyPublisher:
    """Publishes policy versions, whole or as deltas, and removes older ones.

    Each publisher uses its own prefix, and its deltas build on its own policies: its first policy is whole, and so
    is the one after a failed publication. It reuses work of earlier publishers if digests prove it identical:
    weights left on this machine that are also in the store, or a stored policy with the same version and weights.

    Args:
        store: the run's store.
        model_config: the model's configuration, with `save_pretrained`; stored next to the weights.
        scratch: a folder on this machine for the weights, possibly with those of an earlier publisher.
        by: the precedence of this trainer.
        served: the types to publish in.
        costs: records the time and size of each publication.
        chain_max: maximum number of deltas after a whole policy.
        uncompared: publications without a comparison after one in which almost all values changed.
    """

    def __init__(
        self,
        store: Store,
        model_config: Any,
        scratch: Path,
        by: Precedence,
        served: ServedTypes,
        costs: StepCosts,
        chain_max: int = CHAIN_MAX,
        uncompared: int = UNCOMPARED,
    ) -> None:
        self._store = store
        self._by = by
        self._served = served
        self._costs = costs
        self.chain_max, self._uncompared_max = chain_max, uncompared
        self._extras = scratch / "extras"  # files stored with the weights, whole or delta
        shutil.rmtree(self._extras, ignore_errors=True)
        self._extras.mkdir(parents=True)
        model_config.save_pretrained(self._extras)
        self._weights, self._delta = scratch / layout.MODEL, scratch / delta.NAME
        self._last: Published | None = None
        self._is_first = True
        self._snapshot: tuple[Snapshot, Published] | None = None  # being stored, and its policy
        self._idle = threading.Event()  # set while no policy is being published
        self._uncompared = 0
        self._pool = ThreadPoolExecutor(delta.WORKERS, thread_name_prefix="weights")
        self._remover = PolicyRemover(store)
        self._remover_pool = ThreadPoolExecutor(1, thread_name_prefix="remove-policies")  # no step waits for it
        self.removal: Future[bool] = self._remover_pool.submit(lambda: True)  # of older policies, the last begun

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot that is being stored, if there is one."""
        return None if self._snapshot is None else self._snapshot[0]

    def publish(
        self,
        version: PolicyVersion,
        tensors: Iterable[tuple[str, torch.Tensor | LazyTensor]],
        canary: Canary | None,
        since_step: int | None = None,
    ) -> PolicyRef:
        """Store the weights, named as in a Hugging Face checkpoint (tied ones once), and their canary.

        Keeps the timeline's policies since `since_step`; by default only the previous one. Raises StoreError,
        OSError, UnsupportedType.
        """
        self._await_removal()
        self._idle.clear()
        try:
            ref = self._publish(version, tensors, canary)
        finally:
            if self._last is None or self._last.chain == 0:
                self._stop_snapshot()
            self._idle.set()
        self._remove_older(ref.prefix, since_step)
        return ref

    def published(self, version: PolicyVersion) -> PolicyRef | None:
        """Return the newest stored policy of a version, or None. Raises StoreError."""
        for prefix in newest_first(self._store, version):
            with contextlib.suppress(NotFound, Corrupt):
                found = manifest.load(self._store, prefix)
                return PolicyRef(str(version), prefix, found.meta.get(manifest.WEIGHTS) or found.digest)
        return None

    def _publish(
        self,
        version: PolicyVersion,
        tensors: Iterable[tuple[str, torch.Tensor | LazyTensor]],
        canary: Canary | None,
    ) -> PolicyRef:
        begun_s = time.monotonic()
        # If this publication fails the file no longer holds the previous policy, so no delta can follow it.
        last, self._last = self._last, None
        is_first, self._is_first = self._is_first, False
        snapshot_bytes, known = 0, list[str]()
        if last is not None:
            last, snapshot_bytes = self._with_snapshot(last)
        else:  # it may be stored: by another publisher, or by this one if the response was lost
            known = newest_first(self._store, version)
            last = self._find_leftover() if is_first else None
        base = last.ref.digest if last is not None and self._uncompared == 0 else ""
        planned, prefix = self._plan(tensors), layout.policy(version, self._by)
        with ChunkUpload(self._store, prefix, stored={}) as sending:
            # If the policy may already be stored, send nothing before this is known.
            grown = sending.send_prefix if not known else lambda *_: None
            written = scratch.rewrite(self._weights, planned, base, self._delta, self._pool, grown)
            encode_s = round(time.monotonic() - begun_s, 3)
            if (found := find(self._store, written.digest, known)) is not None:
                return self._reuse(found, encode_s, written)
            self._uncompared = self._uncompared_max if written.dense else max(0, self._uncompared - 1)
            self._put_canary(canary)
            published, sent = self._send(sending, version, prefix, written, last)
        self._last = published
        if self._snapshot is None and published.chain and self._is_long(published, 1, written.size_bytes):
            self._snapshot = Snapshot(self._store, published.ref, self._weights, self._idle), published
        took_s = round(time.monotonic() - begun_s, 3)
        self._costs.publish(took_s, sent.size_bytes + snapshot_bytes, written.size_bytes, encode_s)
        log.info(
            "policy_published",
            policy=published.ref.label,
            kind=sent.meta[manifest.KIND],
            weights_bytes=written.size_bytes,
            delta_bytes=written.delta_bytes,
            sent_bytes=sent.size_bytes,
            took_s=took_s,
        )
        return published.ref

    def _find_leftover(self) -> Published | None:
        """Find the stored policy whose weights an earlier publisher left in the file. Raises StoreError."""
        if not self._weights.is_file():
            return None
        try:
            digest = safetensors.content_of(self._weights, self._pool)
        except (Corrupt, OSError) as error:
            log.info("leftover_weights_unreadable", reason=str(error))
            return None
        return find(self._store, digest, newest_first(self._store))

    def _reuse(self, found: Published, took_s: float, written: Written) -> PolicyRef:
        """Continue from an identical policy of the same version that an earlier publisher stored."""
        self._last = found
        self._costs.publish(took_s, 0, written.size_bytes, took_s)
        log.info("policy_reused", policy=found.ref.label, weights_bytes=written.size_bytes)
        return found.ref

    def _with_snapshot(self, last: Published) -> tuple[Published, int]:
        """Base the last policy on the snapshot if it is stored by now. Return it and the snapshot's bytes."""
        if self._snapshot is None or not self._snapshot[0].stored.done():
            return last, 0
        (snapshot, of), self._snapshot = self._snapshot, None
        snapshot.stop()
        try:
            stored = snapshot.stored.result()
        except (StoreError, OSError) as error:
            log.warning("snapshot_not_stored", policy=of.ref.label, reason=str(error))  # a later one may be
            return last, 0
        log.info("snapshot_stored", policy=of.ref.label, sent_bytes=stored.size_bytes)
        chain, chain_bytes = last.chain - of.chain, last.chain_bytes - of.chain_bytes
        return Published(last.ref, chain, chain_bytes, of.ref.prefix), stored.size_bytes

    def _stop_snapshot(self) -> None:
        """Stop the snapshot being stored: no deltas build on it."""
        if self._snapshot is not None:
            self._snapshot[0].stop()
            self._snapshot = None

    def _put_canary(self, canary: Canary | None) -> None:
        (self._extras / layout.CANARY).unlink(missing_ok=True)
        if canary is not None:
            (self._extras / layout.CANARY).write_bytes(to_json(canary))

    def _await_removal(self) -> None:
        try:
            if not self.removal.result():  # started after the previous policy, so mostly done
                self._last = None  # a policy that nodes need is missing: publish a whole one
        except (Corrupt, StoreUnavailable) as error:  # the next removal includes these policies
            log.warning("older_policies_not_removed", reason=str(error))

    def _remove_older(self, current: str, since_step: int | None) -> None:
        self.removal = self._remover_pool.submit(self._remover.remove, current, since_step)

    def _send(
        self,
        sending: ChunkUpload,
        version: PolicyVersion,
        prefix: str,
        written: Written,
        last: Published | None,
    ) -> tuple[Published, Manifest]:
        """Store what was written, as a delta unless the chain is too long. Raises StoreError."""
        files = manifest.files_below(self._extras)
        meta = {manifest.KIND: manifest.WHOLE, manifest.WEIGHTS: written.digest}
        published = Published(PolicyRef(str(version), prefix, written.digest))
        if last is not None and written.delta_bytes is not None:
            files.append((delta.NAME, self._delta))
            meta |= {manifest.BASE: last.ref.label, manifest.BASE_PREFIX: last.ref.prefix}
            followed = Published(
                published.ref, last.chain + 1, last.chain_bytes + written.delta_bytes, last.snapshot
            )
            if not self._is_long(followed, 2, written.size_bytes):
                published = followed
                meta |= {manifest.KIND: manifest.DELTA, manifest.SNAPSHOT: last.snapshot}
        if not published.chain:
            # The delta stays in it, so that nodes with the previous policy need not fetch everything.
            files.append((layout.MODEL, self._weights))
        return published, manifest.publish_once(
            self._store, prefix, sending.finish(files), version, time.time(), meta
        )

    def _is_long(self, published: Published, factor: int, size_bytes: int) -> bool:
        """Return whether the deltas since a whole policy exceed `factor` times the limits."""
        chain_bytes_max = factor * CHAIN_SHARE * size_bytes
        return published.chain > factor * self.chain_max or published.chain_bytes > chain_bytes_max

    def _plan(self, tensors: Iterable[tuple[str, torch.Tensor | LazyTensor]]) -> dict[str, scratch.Tensor]:
        """Plan the tensors in the types to publish. Each is read, rounded and copied when it is written."""
        lazy = {
            name: tensor if isinstance(tensor, LazyTensor) else LazyTensor.of(tensor) for name, tensor in tensors
        }
        trained = {name: Tensor(type_name(name, tensor.dtype), tensor.shape) for name, tensor in lazy.items()}
        return {name: _planned(lazy[name], dtype) for name, dtype in self._served.of(trained).items()}


def _planned(tensor: LazyTensor, name: str) -> scratch.Tensor:
    dtype = OF_TYPE[name]

    def content() -> Bytes:
        # Contiguous: store the parameter itself, not the buffer it is a view of.
        plain = tensor.read().detach().to("cpu", dtype).contiguous().reshape(-1)
        data: Bytes = plain.view(torch.uint8).numpy()
        return data

    return scratch.Tensor(name, tensor.shape, math.prod(tensor.shape) * dtype.itemsize, content)

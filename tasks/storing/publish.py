"""The trainer's weights, put into the store as a policy version that rollout nodes can pull and verify."""

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

from checkpoint.store import layout
from checkpoint.store.codec import to_json
from checkpoint.store.errors import Corrupt, NotFound, StoreError, StoreUnavailable
from checkpoint.store.run_store import Store
from checkpoint.stream import chunks, manifest
from checkpoint.stream.chunks import Sending
from checkpoint.stream.manifest import Manifest
from checkpoint.weights import delta, safetensors, scratch
from checkpoint.weights.safetensors import Bytes
from checkpoint.weights.scratch import Written
from policies.model.vocabulary import PolicyVersion, Precedence
from policies.serving.canary import Canary
from policies.serving.wire import PolicyRef, labelled_version
from policies.weights.tensors import ServedTypes, Tensor
from tasks.storing.published import PolicyRemover, Published, find, newest_first
from tasks.storing.step_costs import StepCosts
from tasks.storing.tensors import TYPES, Unread, at_hand, type_name

log = structlog.get_logger()

# All weights of a policy, stored while its successors are published, so that no step waits for them.
#
# The file of the weights is overwritten meanwhile, so each chunk is of this policy or of a later one, or of two: a
# fuzzy snapshot, as databases take them. Deltas overwrite with values. So whoever applies all that follow this
# policy, up to one that was published after the last chunk was read, has that one's weights whatever he began
# with, and proves it by their digest.

TRANSFERS = 4  # at a time, each with a chunk in memory: 65 GB in 3 minutes at S3's 90 MB/s for each


class SnapshotStopped(Exception):
    """Nobody needs the snapshot any more, or the process ends."""


class Snapshot:
    """Stores the weights in a file as they were when `of` was published, or later.

    Args:
        of: the policy that the file holds now.
        idle: set while nothing is published: publications go before.
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
        """What is not sent yet need not be: the weights are no longer what deltas follow."""
        self._stopped = True
        self._pool.shutdown(wait=False)

    def _run(self) -> Manifest:
        """Raises Stopped, StoreError (Corrupt: another has begun the file anew), OSError."""
        with Sending(
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
        """A copy of a chunk, for the file may change while it is hashed and sent."""
        while not self._idle.wait(timeout=1.0):
            self._go_on()
        self._go_on()
        with path.open("rb") as file:
            size_bytes = min(chunks.CHUNK_BYTES, self._size_bytes - offset)  # Corrupt where it is shorter by now
            yield safetensors.read(file.fileno(), offset, size_bytes).data

    def _go_on(self) -> None:
        # A process that ends waits for its pools' threads: they end at the next chunk.
        if self._stopped or not threading.main_thread().is_alive():
            raise SnapshotStopped


# Deltas after a whole policy, in number and as a share of it: so a node that comes fetches about half as much
# again and reads few manifests, while whole ones take about as much of the trainer's link as the deltas do. After
# so many the whole is stored while training goes on; after twice as many, if the store is too slow, a step waits.
CHAIN_MAX = 32
CHAIN_SHARE = 0.5
# Where almost all changes, as at high learning rates, the next ones will: so many are not compared.
UNCOMPARED = 8

OF_TYPE = {name: dtype for dtype, name in TYPES.items()}


class PolicyPublisher:
    """Publishes policy versions, whole or as what has changed since the one before, and removes older ones.

    Each publisher writes below names of its own, and builds upon what it has itself published: the first is whole,
    and so is the one after a publication that failed. Of earlier ones' it takes what their digests prove: weights
    that were left on this machine and are in the store, too, or a policy of the version and the weights that are
    to be published.

    Args:
        store: the run's store.
        model_config: the model's configuration, with `save_pretrained`; stored beside the weights.
        scratch: a folder of its own on this machine, with room for the weights; an earlier one's may be in it.
        by: the precedence of its trainer.
        served: the types to publish in.
        costs: told what each took.
    """

    def __init__(
        self,
        store: Store,
        model_config: Any,
        scratch: Path,
        by: Precedence,
        served: ServedTypes,
        costs: StepCosts,
    ) -> None:
        self._store = store
        self._by = by
        self._served = served
        self._costs = costs
        self._beside = scratch / "beside"  # what goes along with the weights, however they travel
        shutil.rmtree(self._beside, ignore_errors=True)
        self._beside.mkdir(parents=True)
        model_config.save_pretrained(self._beside)
        self._weights, self._delta = scratch / layout.MODEL, scratch / delta.NAME
        self._last: Published | None = None
        self._begins = True
        self._taking: tuple[Snapshot, Published] | None = None  # a snapshot, and what it is of
        self._idle = threading.Event()  # while nothing is published
        self._uncompared = 0
        self._pool = ThreadPoolExecutor(delta.WORKERS, thread_name_prefix="weights")
        self._older = PolicyRemover(store)
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="remove-policies")  # no step waits for it
        self._removing: Future[bool] = self._remover.submit(lambda: True)

    def publish(
        self,
        version: PolicyVersion,
        tensors: Iterable[tuple[str, torch.Tensor | Unread]],
        canary: Canary | None,
        since_step: int | None = None,
    ) -> PolicyRef:
        """Store the weights, named as in a Hugging Face checkpoint (tied ones once), and what they compute.

        Of the timeline's older policies those since `since_step` stay, by default the last one alone. Raises
        StoreError, OSError, UnsupportedType.
        """
        self._heed_removal()
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
        """The newest stored policy of that version, if there is one. Raises StoreError."""
        for prefix in newest_first(self._store, version):
            with contextlib.suppress(NotFound, Corrupt):
                found = manifest.load(self._store, prefix)
                return PolicyRef(str(version), prefix, found.meta.get(manifest.WEIGHTS) or found.digest)
        return None

    def _publish(
        self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor | Unread]], canary: Canary | None
    ) -> PolicyRef:
        begun_s = time.monotonic()
        # Until this one is in the store nothing is: what it was to follow is no longer in the file.
        last, self._last = self._last, None
        begins, self._begins = self._begins, False
        taken_bytes, known = 0, list[str]()
        if last is not None:
            last, taken_bytes = self._with_snapshot(last)
        else:  # it may be there: another publisher's, or this one's, whose answer was lost
            known = newest_first(self._store, version)
            last = self._left_here() if begins else None
        base = last.ref.digest if last is not None and self._uncompared == 0 else ""
        planned, prefix = self._plan(tensors), layout.policy(version, self._by)
        with Sending(self._store, prefix, stored={}) as sending:
            # What may be in the store is not sent before it is known whether it is.
            grown = sending.grown if not known else lambda *_: None
            written = scratch.rewrite(self._weights, planned, base, self._delta, self._pool, grown)
            encode_s = round(time.monotonic() - begun_s, 3)
            if (found := find(self._store, written.digest, known)) is not None:
                return self._reuse(found, encode_s, written)
            self._uncompared = UNCOMPARED if written.dense else max(0, self._uncompared - 1)
            self._put_canary(canary)
            published, sent = self._send(sending, version, prefix, written, last)
        self._last = published
        if self._taking is None and published.chain and _is_long(published, 1, written.size_bytes):
            self._taking = Snapshot(self._store, published.ref, self._weights, self._idle), published
        took_s = round(time.monotonic() - begun_s, 3)
        self._costs.publish(took_s, sent.size_bytes + taken_bytes, written.size_bytes, encode_s)
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

    def _left_here(self) -> Published | None:
        """The policy whose weights an earlier publisher has left in the file. Raises StoreError."""
        if not self._weights.is_file():
            return None
        try:
            digest = safetensors.content_of(self._weights, self._pool)
        except (Corrupt, OSError) as error:
            log.info("weights_left_unreadable", why=str(error))
            return None
        return find(self._store, digest, newest_first(self._store))

    def _reuse(self, found: Published, took_s: float, written: Written) -> PolicyRef:
        """Go on from the policy that an earlier publisher has stored under this very label."""
        self._last = found
        self._costs.publish(took_s, 0, written.size_bytes, took_s)
        log.info("policy_found", policy=found.ref.label, weights_bytes=written.size_bytes)
        return found.ref

    def _with_snapshot(self, last: Published) -> tuple[Published, int]:
        """The last one, as what follows the snapshot that has been stored since, and that one's size in bytes."""
        if self._taking is None or not self._taking[0].stored.done():
            return last, 0
        (snapshot, of), self._taking = self._taking, None
        snapshot.stop()
        try:
            stored = snapshot.stored.result()
        except (StoreError, OSError) as error:
            log.warning("snapshot_not_stored", policy=of.ref.label, why=str(error))  # the next one may be
            return last, 0
        log.info("snapshot_stored", policy=of.ref.label, sent_bytes=stored.size_bytes)
        chain, chain_bytes = last.chain - of.chain, last.chain_bytes - of.chain_bytes
        return Published(last.ref, chain, chain_bytes, of.ref.prefix), stored.size_bytes

    def _stop_snapshot(self) -> None:
        """Give up the one that is taken: no deltas follow what the file holds."""
        if self._taking is not None:
            self._taking[0].stop()
            self._taking = None

    def _put_canary(self, canary: Canary | None) -> None:
        (self._beside / layout.CANARY).unlink(missing_ok=True)
        if canary is not None:
            (self._beside / layout.CANARY).write_bytes(to_json(canary))

    def _heed_removal(self) -> None:
        try:
            if not self._removing.result():  # begun after the policy before: long done
                self._last = None  # others removed or lost what nodes need: this one is whole
        except (Corrupt, StoreUnavailable) as error:  # the next time it removes those, too
            log.warning("older_policies_not_removed", why=str(error))

    def _remove_older(self, present: str, since_step: int | None) -> None:
        self._removing = self._remover.submit(self._older.remove, present, since_step)

    def _send(
        self,
        sending: Sending,
        version: PolicyVersion,
        prefix: str,
        written: Written,
        last: Published | None,
    ) -> tuple[Published, Manifest]:
        """Store what was written: as a delta where there is one and not too many others. Raises StoreError."""
        files = manifest.files_below(self._beside)
        meta = {manifest.KIND: manifest.WHOLE, manifest.WEIGHTS: written.digest}
        published = Published(PolicyRef(str(version), prefix, written.digest))
        if last is not None and written.delta_bytes is not None:
            files.append((delta.NAME, self._delta))
            meta |= {manifest.BASE: last.ref.label, manifest.BASE_PREFIX: last.ref.prefix}
            followed = Published(
                published.ref, last.chain + 1, last.chain_bytes + written.delta_bytes, last.snapshot
            )
            if not _is_long(followed, 2, written.size_bytes):
                published = followed
                meta |= {manifest.KIND: manifest.DELTA, manifest.SNAPSHOT: last.snapshot}
        if not published.chain:
            # With the delta still beside it: nodes that hold what was before need not fetch all.
            files.append((layout.MODEL, self._weights))
        return published, manifest.publish_once(
            self._store, prefix, sending.finish(files), version, time.time(), meta
        )

    def _plan(self, tensors: Iterable[tuple[str, torch.Tensor | Unread]]) -> dict[str, scratch.Tensor]:
        """The tensors as they are to be written; each is read, rounded and copied when it is its turn."""
        given = {name: one if isinstance(one, Unread) else at_hand(one) for name, one in tensors}
        held = {name: Tensor(type_name(name, one.dtype), one.shape) for name, one in given.items()}
        return {name: _planned(given[name], dtype) for name, dtype in self._served.of(held).items()}


def _is_long(published: Published, times: int, size_bytes: int) -> bool:
    """Whether deltas since a whole policy are more than so many times what is meant."""
    return published.chain > times * CHAIN_MAX or published.chain_bytes > times * CHAIN_SHARE * size_bytes


def _planned(tensor: Unread, name: str) -> scratch.Tensor:
    dtype = OF_TYPE[name]

    def content() -> Bytes:
        # What is stored must be the parameter, not the buffer it lives in.
        plain = tensor.read().detach().to("cpu", dtype).contiguous().reshape(-1)
        found: Bytes = plain.view(torch.uint8).numpy()
        return found

    return scratch.Tensor(name, tensor.shape, math.prod(tensor.shape) * dtype.itemsize, content)

"""Publish the trainer's weights to the store as policy versions that rollout nodes can pull and verify."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors.torch import save_file

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
from grpo_orch.policies.weights.adapters import ADAPTER_BASE, ADAPTER_CONFIG, ADAPTER_WEIGHTS
from grpo_orch.policies.weights.tensors import ServedTypes, Tensor
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


# Stored policies, by prefix. Reuse needs the same digest of the weights.


@dataclass(frozen=True, slots=True)
class Published:
    """A stored policy.

    `chain` counts the deltas since the last whole policy or snapshot; `snapshot` is the latter's prefix.
    """

    ref: PolicyRef
    chain: int = 0
    chain_bytes: int = 0
    snapshot: str = ""


def newest_first(store: Store, only: PolicyVersion | None = None) -> list[str]:
    """Return the prefixes of stored policies, newest first, or only those of one version."""
    ages: dict[str, tuple[Precedence, int]] = {}
    for timeline in store.folders(layout.POLICIES):
        for prefix in store.folders(timeline):
            with contextlib.suppress(ValueError):  # a foreign file
                if only in (None, layout.version_of(f"{prefix}/")):
                    ages[prefix] = age(prefix)
    return sorted(ages, key=lambda prefix: ages[prefix], reverse=True)


def age(prefix: str) -> tuple[Precedence, int]:
    """Return a key that sorts policies by creation. Raises ValueError for a foreign name."""
    return layout.author_of(prefix), layout.version_of(f"{prefix}/").step


def find(store: Store, digest: str, prefixes: Iterable[str]) -> Published | None:
    """Return the first policy with weights of that digest, if its manifest and all manifests it needs exist.

    Raises StoreError if the store itself fails.
    """
    for prefix in prefixes:
        with contextlib.suppress(NotFound, Corrupt):
            policy = manifest.load(store, prefix)
            if policy.meta.get(manifest.WEIGHTS) == digest:
                return _with_chain(store, policy)
    return None


def _with_chain(store: Store, policy: Manifest) -> Published:
    """Load a policy's chain of deltas. Raises NotFound, Corrupt, StoreError."""
    at, chain, chain_bytes = policy, 0, 0
    if snapshot := policy.meta.get(manifest.SNAPSHOT, ""):
        manifest.load(store, snapshot, layout.SNAPSHOT)
    while at.meta.get(manifest.KIND) == manifest.DELTA and at.root != snapshot:
        chain, chain_bytes = chain + 1, chain_bytes + sum(f.size_bytes for f in at.files if f.name == delta.NAME)
        at = manifest.load(store, at.meta[manifest.BASE_PREFIX])
    ref = PolicyRef(policy.version, policy.root, policy.meta[manifest.WEIGHTS])
    return Published(ref, chain, chain_bytes, snapshot)


# Removal keeps the current and the previous policy usable, and more if completions are sampled from older ones.


@dataclass(frozen=True, slots=True)
class _Bases:
    """Prefixes of a delta's base, and of the last snapshot if it has one."""

    base: str = ""
    snapshot: str = ""


class PolicyRemover:
    """Removes policies of this and older publishers, never those of a newer publisher.

    So a replaced publisher that still runs cannot harm its successor, which removes what it leaves.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bases: dict[str, _Bases] = {}  # by policy; manifests never change

    def remove(self, current: str, since_step: int | None = None) -> bool:
        """Remove old policies, and unfinished ones of killed trainers. Return whether the kept ones are complete.

        Kept are the current policy, the previous one of this or an older timeline, those of the current timeline
        since `since_step`, and the policies that their deltas need.

        Raises StoreError; Corrupt, before removing anything, if a damaged manifest hides what must be kept.
        """
        keys = [entry.key for entry in self._store.entries(layout.POLICIES)]
        whole = {key.removesuffix(f"/{layout.MANIFEST}") for key in keys if key.endswith(f"/{layout.MANIFEST}")}
        older: dict[str, tuple[Precedence, int]] = {}
        for prefix in {"/".join(key.split("/")[:3]) for key in keys}:
            with contextlib.suppress(ValueError):  # a foreign file
                older[prefix] = age(prefix)
        in_order = sorted((p for p in older if older[p] < age(current)), key=lambda p: older[p])
        complete = [prefix for prefix in in_order if prefix in whole]
        usable = {current, *complete[-1:]}
        if since_step is not None:
            since = PolicyVersion(layout.version_of(f"{current}/").timeline, since_step)
            versions = {prefix: layout.version_of(f"{prefix}/") for prefix in complete}
            usable |= {prefix for prefix, at in versions.items() if at.timeline == since.timeline and at >= since}
        needed = {base for prefix in usable for base in self._with_bases(prefix)}
        snapshots = {self._bases_of(prefix).snapshot for prefix in usable} - {""}
        for prefix in in_order:
            if prefix not in needed:
                manifest.remove(self._store, prefix)
        self._bases = {prefix: bases for prefix, bases in self._bases.items() if prefix in needed}
        return needed <= whole and {f"{prefix}/{layout.SNAPSHOT}" for prefix in snapshots} <= set(keys)

    def _with_bases(self, prefix: str) -> list[str]:
        """Return the policy and its chain of bases, back to one with all weights."""
        chain, snapshot = list[str](), self._bases_of(prefix).snapshot
        while prefix and prefix not in chain:
            chain.append(prefix)
            prefix = self._bases_of(prefix).base if prefix != snapshot else ""
        return chain

    def _bases_of(self, prefix: str) -> _Bases:
        """Return the bases of a delta; empty for a whole or a missing policy.

        Raises Corrupt: a later read may succeed, and nodes may need the bases it names.
        """
        if prefix not in self._bases:
            meta = dict[str, str]()
            with contextlib.suppress(NotFound):
                meta = manifest.load(self._store, prefix).meta
            is_delta = meta.get(manifest.KIND) == manifest.DELTA
            base, snapshot = meta.get(manifest.BASE_PREFIX, ""), meta.get(manifest.SNAPSHOT, "")
            self._bases[prefix] = _Bases(base, snapshot) if is_delta else _Bases()
        return self._bases[prefix]


# LoRA adapters as policy versions: PEFT's two files and the identity of the base model.

# Keys that differ between machines, left out so that equal adapters have equal digests.
MACHINE_KEYS = ("peft_version", "base_model_name_or_path")


class AdapterPublisher(PolicyPublisher):
    """Publishes adapters like a PolicyPublisher publishes weights.

    A policy's digest covers the adapter's tensors, its configuration and the identity of its base model.

    Args:
        store, scratch, by, costs: as for a PolicyPublisher.
        config: the adapter's configuration from LoraConfig's `to_dict`.
        model: the base model, as named in run.yaml.
        base: its identity (`tasks.machine.base_model.identity_of`); empty if unknown.
        served: the type that the nodes' engines round an adapter to.
    """

    def __init__(
        self,
        store: Store,
        config: Mapping[str, Any],
        model: str,
        base: str,
        scratch: Path,
        by: Precedence,
        served: ServedTypes,
        costs: StepCosts,
    ) -> None:
        super().__init__(store, _Files(config, model, base), scratch, by, served, costs)

    def publish(
        self,
        version: PolicyVersion,
        tensors: Iterable[tuple[str, torch.Tensor]],
        canary: Canary | None,
        since_step: int | None = None,
    ) -> PolicyRef:
        """Store the adapter's tensors and their canary.

        The tensors are rounded to the type that nodes serve in, if known: vLLM does that first when it loads them
        (`vllm/lora/lora_model.py`), so a node computes the same from half the bytes. Otherwise they keep the type
        they are trained in. Raises StoreError.
        """
        self._await_removal()
        begun_s = time.monotonic()
        whole = dict(self._rounded(dict(tensors)))
        save_file(whole, self._extras / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        self._put_canary(canary)
        prefix = layout.policy(version, self._by)
        meta = {manifest.KIND: manifest.ADAPTER}
        published = manifest.publish(self._store, prefix, self._extras, version, time.time(), meta)
        self._costs.publish(round(time.monotonic() - begun_s, 3), published.size_bytes, published.size_bytes)
        self._remove_older(prefix, since_step)
        return PolicyRef(str(version), prefix, published.digest)

    def _rounded(self, trained: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        types = {
            name: Tensor(type_name(name, tensor.dtype), tuple(tensor.shape)) for name, tensor in trained.items()
        }
        for name, dtype in self._served.of(types).items():
            yield name, trained[name].detach().to("cpu", OF_TYPE[dtype]).contiguous()


class _Files:
    """The files that are the same in every version, written like PEFT's `save_pretrained`."""

    def __init__(self, config: Mapping[str, Any], model: str, base: str) -> None:
        kept = {key: _in_order(value) for key, value in config.items() if key not in MACHINE_KEYS}
        self._config = {**kept, "base_model_name_or_path": model, "inference_mode": True}
        self._base = {"model": model, "identity": base}

    def save_pretrained(self, folder: Path) -> None:
        for name, content in ((ADAPTER_CONFIG, self._config), (ADAPTER_BASE, self._base)):
            (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True))


def _in_order(value: Any) -> Any:
    """Sort sets, since PEFT keeps names in sets, whose order differs between processes."""
    return sorted(value) if isinstance(value, set | frozenset) else value

"""How a node comes by a policy: by the deltas since one that it holds, or since the last that is stored whole."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from checkpoint.store import layout
from checkpoint.store.errors import Corrupt, NotFound, StoreError
from checkpoint.stream import manifest
from checkpoint.stream.manifest import Manifest
from checkpoint.weights.safetensors import DIGEST_BYTES

# Deltas at a time: more than publishers put after a whole policy, so that those of two of them are followed.
DELTAS_MAX = 64


@dataclass(frozen=True, slots=True)
class Route:
    """Where to begin and what follows. Either `start` is held, by its digest, or `whole` is to be fetched."""

    deltas: list[Manifest]
    start: str = ""
    whole: Manifest | None = None


def route_to(load: Callable[..., Manifest], wanted: Manifest, held: Collection[str]) -> Route:
    """The shortest way from weights that are held, else from the nearest whole policy.

    By digests alone: two trainers may have published one version, and a rollback leads to older ones.

    Args:
        load: reads a manifest at its place in the store, of another name if told so.
        held: digests of weights.

    Raises NotFound, Corrupt (deltas that nothing whole comes before), StoreError.
    """
    deltas, from_whole, at = list[Manifest](), None, wanted
    lost: StoreError | None = None
    while True:
        if manifest.WEIGHTS in at.meta and digest_of(at) in held:
            return Route(deltas, start=digest_of(at))
        if from_whole is None and at.meta.get(manifest.KIND) != manifest.DELTA:
            from_whole = Route(deltas, whole=at)
        elif from_whole is None and at.root == wanted.meta.get(manifest.SNAPSHOT):
            try:
                from_whole = Route(deltas, whole=load(at.root, layout.SNAPSHOT))
            except (NotFound, Corrupt) as error:
                lost = error  # what is held may be before it
        base = at.meta.get(manifest.BASE, "")
        if not base or len(deltas) == DELTAS_MAX or (from_whole is not None and not held):
            break
        deltas = [at, *deltas]
        before = base.partition("@")[2]
        if before in held:
            return Route(deltas, start=before)
        try:
            at = load(at.meta.get(manifest.BASE_PREFIX, ""))
        except (NotFound, Corrupt) as error:
            if from_whole is None:
                raise lost or error from None
            break
        if digest_of(at) != before:
            raise Corrupt(f"{deltas[0].root} is a delta to {base}, and {at.root} holds {digest_of(at)}")
    if from_whole is None:
        raise lost or Corrupt(f"{wanted.root}: {len(deltas)} deltas, and no whole policy before them")
    return from_whole


def digest_of(policy: Manifest) -> str:
    """The digest in its label."""
    return policy.digest_as("0" * 2 * DIGEST_BYTES)

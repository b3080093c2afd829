"""What a launch that failed has brought: a machine that is there is paid for, and one that never was is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from orchestrator.clouds.sky.clusters import Clusters
from orchestrator.clouds.sky.sdk.calls import CALL_TIMEOUT_S
from orchestrator.clouds.sky.unrecorded import UnrecordedClusters
from policies.model.vocabulary import Refusal

if TYPE_CHECKING:
    from orchestrator.clouds.sky.sdk.skypilot import SkyPilot


class FailedLaunches:
    """Asked by the threads that launch and take down the clusters of one run."""

    def __init__(self, sky: SkyPilot, unrecorded: UnrecordedClusters, clusters: Clusters) -> None:
        self._sky, self._unrecorded, self._clusters = sky, unrecorded, clusters
        self._unbought: set[str] = set()  # launches that are called off, and have brought nothing

    def call_off(self, name: str) -> None:
        """A launch that is under way is about to be ended. SkyPilot will not say what it had come to."""
        if self._sky.is_bought(name) is False:
            self._unbought.add(name)

    def ended(self, name: str) -> None:
        """A launch has ended, one way or another."""
        self._unbought.discard(name)

    def what_to_raise(self, name: str, error: Exception) -> Exception:
        """Return what is to be raised for the failure of a launch, by what the cloud has of it."""
        match error:
            case CloudUnavailable() if name in self._unbought:
                return CloudRefused(Refusal.UNKNOWN, "it was called off before its cloud had a machine")
            case CloudRefused():
                return self._refused(name, error)
            case _:
                return error

    def _refused(self, name: str, error: CloudRefused) -> CloudRefused | CloudUnavailable:
        try:
            left = self._unrecorded.confirm(name, CALL_TIMEOUT_S)
        except CloudUnavailable as unknown:
            return CloudUnavailable(f"{error}; whether it left a machine is not known: {unknown}")
        if left is None:
            return error
        self._clusters.saw(left)
        return CloudRefused(error.refusal, str(error), left=True)

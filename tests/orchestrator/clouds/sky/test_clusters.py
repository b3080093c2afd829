"""What a process believes of its clusters, when looks and calls overlap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_orch.orchestrator.clouds.sky.records import Cluster, ClusterState
from grpo_orch.orchestrator.clouds.sky.watch import Clusters

NAME = "grpo-tiny-1f2e3d4c-rollout-0-i1"
UP = Cluster(
    name=NAME,
    state=ClusterState.UP,
    infra="aws/us-east-1/us-east-1a",
    spot=True,
    price_usd_per_h=0.4,
    ssh_address=("198.18.0.7", 22),
)
STARTING = replace(UP, state=ClusterState.STARTING)


@pytest.fixture
def clusters() -> Clusters:
    return Clusters()


def look(clusters: Clusters, *found: Cluster) -> None:
    clusters.end_scan(clusters.begin_scan(), found)


@pytest.mark.parametrize(
    ("looks", "lost"),
    [
        ([UP], ""),
        ([UP, None], "preempted"),
        ([UP, None, None], "preempted"),  # and stays so
        ([replace(UP, spot=False), None], "the cloud no longer has it"),
        ([UP, STARTING], ""),  # SkyPilot cannot reach it, and it is not given up for that
        ([UP, replace(UP, state=ClusterState.STOPPED)], "it was stopped"),
        ([STARTING, None], None),  # it never came up, and is forgotten
    ],
)
def test_what_looks_find_of_a_cluster(clusters: Clusters, looks: list[Cluster | None], lost: str | None) -> None:
    for found in looks:
        look(clusters, *([found] if found else []))
    entry = clusters.entries().get(NAME)
    assert (entry and entry.lost) == lost
    assert entry is None or entry.is_up == (not lost)


def test_what_is_lost_stays_lost_until_it_is_forgotten(clusters: Clusters) -> None:
    look(clusters, UP)
    clusters.mark_lost(NAME, "preempted")
    clusters.mark_lost(NAME, "something else")
    look(clusters, UP)
    assert clusters.entries()[NAME].lost == "preempted"
    clusters.forget(NAME)
    assert clusters.entries() == {}


def test_a_look_that_began_before_a_launch_ended_does_not_undo_it(clusters: Clusters) -> None:
    began = clusters.begin_scan()
    with clusters.call(NAME):
        clusters.record(UP)
    clusters.end_scan(began, [])
    assert clusters.entries()[NAME].is_up
    look(clusters)
    assert clusters.entries()[NAME].lost == "preempted"


def test_a_look_that_began_before_a_teardown_ended_does_not_bring_it_back(clusters: Clusters) -> None:
    look(clusters, UP)
    began = clusters.begin_scan()
    with clusters.call(NAME):
        clusters.forget(NAME)
    clusters.end_scan(began, [UP])
    assert clusters.entries() == {}


def test_while_a_call_lasts_no_look_counts(clusters: Clusters) -> None:
    with clusters.call(NAME):
        look(clusters, STARTING)
        assert clusters.entries() == {}
    look(clusters, STARTING)
    assert not clusters.entries()[NAME].is_up


def test_what_is_being_made_is_known_until_the_last_call_about_it_ends(clusters: Clusters) -> None:
    with clusters.call(NAME):
        with clusters.call(NAME):
            assert clusters.launching() == [NAME]
        assert clusters.launching() == [NAME]
        clusters.record(UP)
        assert clusters.launching() == []  # from now on by its entry
        clusters.forget(NAME)
    assert clusters.launching() == []


def test_a_new_attempt_forgives_the_failed_one(clusters: Clusters) -> None:
    look(clusters, UP)
    clusters.mark_submitted(NAME, 1)
    clusters.mark_failed(NAME)
    assert clusters.entries()[NAME].failed
    clusters.mark_submitted(NAME, 2)
    assert (clusters.entries()[NAME].attempt, clusters.entries()[NAME].failed) == (2, False)


def test_what_is_handed_out_is_a_copy(clusters: Clusters) -> None:
    look(clusters, UP)
    clusters.entries()[NAME].lost = "not really"
    assert clusters.entries()[NAME].lost == ""

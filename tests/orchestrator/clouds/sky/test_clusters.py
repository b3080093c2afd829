"""What a process believes of its clusters, when looks and calls overlap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.clouds.sky.clusters import Book
from orchestrator.clouds.sky.types import Cluster, ClusterState

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
def book() -> Book:
    return Book()


def look(book: Book, *clusters: Cluster) -> None:
    book.end_look(book.begin_look(), clusters)


def lost(book: Book) -> str:
    return book.entries()[NAME].lost


def test_a_cluster_that_was_up_and_is_no_longer_on_record_is_lost(book: Book) -> None:
    look(book, UP)
    assert book.entries()[NAME].is_up
    look(book)
    assert lost(book) == "preempted"
    assert not book.entries()[NAME].is_up


def test_a_lost_on_demand_cluster_was_not_preempted(book: Book) -> None:
    look(book, replace(UP, spot=False))
    look(book)
    assert lost(book) == "the cloud no longer has it"


def test_a_cluster_that_never_came_up_is_forgotten(book: Book) -> None:
    look(book, STARTING)
    look(book)
    assert book.entries() == {}


def test_a_cluster_that_skypilot_cannot_reach_is_not_given_up_for_that(book: Book) -> None:
    look(book, UP)
    look(book, STARTING)
    assert book.entries()[NAME].is_up


def test_a_stopped_cluster_is_lost(book: Book) -> None:
    look(book, UP)
    look(book, replace(UP, state=ClusterState.STOPPED))
    assert lost(book) == "it was stopped"


def test_what_is_lost_stays_lost_until_it_is_forgotten(book: Book) -> None:
    look(book, UP)
    book.lose(NAME, "preempted")
    book.lose(NAME, "something else")
    look(book, UP)
    assert lost(book) == "preempted"
    book.forget(NAME)
    assert book.entries() == {}


def test_a_look_that_began_before_a_launch_ended_does_not_undo_it(book: Book) -> None:
    began = book.begin_look()
    with book.call(NAME):
        book.saw(UP)
    book.end_look(began, [])
    assert book.entries()[NAME].is_up
    look(book)
    assert lost(book) == "preempted"


def test_a_look_that_began_before_a_teardown_ended_does_not_bring_it_back(book: Book) -> None:
    look(book, UP)
    began = book.begin_look()
    with book.call(NAME):
        book.forget(NAME)
    book.end_look(began, [UP])
    assert book.entries() == {}


def test_while_a_call_lasts_no_look_counts(book: Book) -> None:
    with book.call(NAME):
        look(book, STARTING)
        assert book.entries() == {}
    look(book, STARTING)
    assert not book.entries()[NAME].is_up


def test_what_is_being_made_is_known_until_the_last_call_about_it_ends(book: Book) -> None:
    with book.call(NAME):
        with book.call(NAME):
            assert book.being_made() == [NAME]
        assert book.being_made() == [NAME]
        book.saw(UP)
        assert book.being_made() == []  # from now on by its entry
        book.forget(NAME)
    assert book.being_made() == []


def test_a_new_attempt_forgives_the_failed_one(book: Book) -> None:
    look(book, UP)
    book.submitted(NAME, 1)
    book.failed(NAME)
    assert book.entries()[NAME].failed
    book.submitted(NAME, 2)
    assert (book.entries()[NAME].attempt, book.entries()[NAME].failed) == (2, False)


def test_what_is_handed_out_is_a_copy(book: Book) -> None:
    look(book, UP)
    book.entries()[NAME].lost = "not really"
    assert lost(book) == ""

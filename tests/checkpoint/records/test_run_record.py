"""run.json of every release means what it meant to who wrote it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from checkpoint.records import documents
from checkpoint.records.documents import RunRecord
from checkpoint.store import layout
from checkpoint.store.run_store import Store
from policies.control.fleet.markets import market_of, may_stand_in
from policies.model.vocabulary import Market, Role
from tests.stand_ins.world import spec

names = itertools.count()


def read_back(resources: dict[str, Any], *, old: bool) -> RunRecord:
    """The record of a run with these resources, written by this release or by one before stand-ins."""
    store = Store(f"memory://run-record-{next(names)}")
    run = replace(spec(), rollout=replace(spec().rollout, resources=resources))
    plain = msgspec.json.decode(documents.create_run(store, RunRecord(documents.SCHEMA, "sim-0", 0.0, run)))
    if old:
        del plain["spec"]["policies"]["fleet"]
        store.put(layout.RUN, msgspec.json.encode(plain))
    return documents.read_run(store)


@pytest.mark.parametrize(
    ("resources", "old", "stands_in", "market"),
    [
        ({}, False, True, Market.SPOT),
        ({}, True, False, Market.SPOT),
        ({"accelerators": "L4:1"}, True, False, Market.SPOT),
        ({"use_spot": False}, True, False, Market.ON_DEMAND),
        ({"any_of": [{"use_spot": True}, {"use_spot": False}]}, True, False, Market.SPOT),
    ],
)
def test_a_run_from_before_stand_ins_buys_on_spot_alone(
    resources: dict[str, Any], old: bool, stands_in: bool, market: Market
) -> None:
    run = read_back(resources, old=old).spec
    assert (may_stand_in(run), market_of(Role.ROLLOUT, run)) == (stands_in, market)
    assert run.rollout.resources.items() >= resources.items()

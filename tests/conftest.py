"""Stores that tests share: each server is started once, by the first test that asks for it."""

from __future__ import annotations

import os

os.environ["COLUMNS"] = "200"  # the terminal of the commands, which is measured when they are imported

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.rigs.sky.fixtures import sky_image, sky_rig  # noqa: F401  # pytest finds them here
from tests.rigs.store.ceph_server import ceph_server, missing_programs
from tests.rigs.store.fault_proxy import FaultProxy, fault_proxy
from tests.rigs.store.moto_server import moto_server
from tests.rigs.store.server import S3Server

# How long an example takes, or takes to be made, says how busy the machine is and nothing of the code. In CI the
# examples are the same each time, so that a change is judged by what it changed.
settings.register_profile(
    "any load",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("any load")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run side by side, those on Ceph keep to one process: its daemons take a gigabyte."""
    for item in items:
        if {"ceph", "ceph_users", "ceph_proxy"} & set(getattr(item, "fixturenames", ())) or "ceph" in item.name:
            item.add_marker(pytest.mark.xdist_group("ceph"))


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """What a test has the log configured to, the command line above all, ends with it: its stderr does."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with moto_server(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def ceph_users() -> Iterator[tuple[S3Server, S3Server]]:
    """Ceph's gateway as an ordinary user sees it, and as one without any room left."""
    if missing := missing_programs():
        text = f"{', '.join(missing)} not installed: run `make test-packages`"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    # A short path: the daemons' sockets lie in it, and a socket's path has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="ceph-") as folder, ceph_server(Path(folder)) as users:
        yield users


@pytest.fixture(scope="session")
def ceph(ceph_users: tuple[S3Server, S3Server]) -> S3Server:
    return ceph_users[0]


@pytest.fixture
def proxy(moto: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(moto.endpoint) as proxy:
        yield proxy


@pytest.fixture
def ceph_proxy(ceph: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(ceph.endpoint) as proxy:
        yield proxy

"""What tests need, what they may be skipped for, and the stores that they share, each started once."""

from __future__ import annotations

import os

os.environ["COLUMNS"] = "200"  # the terminal of the commands, which is measured when they are imported

import logging
import tempfile
import time
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.rigs.async_tests import pytest_pyfunc_call  # noqa: F401  # pytest finds it here
from tests.rigs.command_line import grpo_orch  # noqa: F401  # pytest finds it here
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


# The environment of the nodes has tests of its own: `make test-node`.
collect_ignore = [] if find_spec("torch") else ["node"]

# In CI a test that is skipped for anything else has failed: there, whatever tests need is installed.
HONEST_REASONS = ("this machine has a GPU", "vLLM's CPU build alone needs libnuma")
ROOT_FIXTURES = {"sky_image", "small_memory", "small_disk"}
# Files with minutes of tests, the longest first: what begins last would keep one core, with the other idle.
LONG_FILES = (
    "tests/e2e/test_sky.py",
    "tests/e2e/test_training.py",
    "tests/e2e/test_agents.py",
    "tests/e2e/test_evaluation.py",
    "tests/node/ranks/test_divided_resume.py",
    "tests/node/test_check_gpu.py",
    "tests/node/ranks/test_killed.py",
)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs Ceph, whose daemons take a gigabyte and are shared in one process, and what needs root.

    Long files come first.
    """
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "ceph_users" in fixtures or "ceph" in item.name:
            item.add_marker(pytest.mark.ceph)
            item.add_marker(pytest.mark.xdist_group("ceph"))
        if fixtures & ROOT_FIXTURES:
            item.add_marker(pytest.mark.root)
    order = {file: place for place, file in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


@pytest.hookimpl(trylast=True)  # once there is a terminal
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and terminal is not None:  # the processes of tests have none
        config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_report_header() -> str:
    return time.strftime("begun at %T")


class FailuresAtOnce:
    """In CI a failure is said when it is seen, and when that was: a run may be cut off before its summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)  # behind its letter
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line(f"\n{time.strftime('%T')} {report.nodeid} failed in {report.duration:.0f} s")
            self.terminal.write_line(report.longreprtext)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _no_silent_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _no_silent_skip(report)
    return report


def _no_silent_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not os.environ.get("CI") or not report.skipped or hasattr(report, "wasxfail"):
        return
    *_, reason = report.longrepr if isinstance(report.longrepr, tuple) else (str(report.longrepr),)
    if not any(honest in reason for honest in HONEST_REASONS):
        report.outcome, report.longrepr = "failed", f"In CI nothing is skipped for this: {reason}"


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """What a test has the log configured to, the command line above all, ends with it: its stderr does."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def quiet_log(own_log: None) -> None:  # noqa: ARG001  # which ends it
    """The log of thousands of ticks is of no use."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with moto_server(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def ceph_users() -> Iterator[tuple[S3Server, S3Server]]:
    """Ceph's gateway as an ordinary user sees it, and as one without any room left."""
    if missing := missing_programs():
        pytest.skip(f"{', '.join(missing)} not installed: run `make test-packages`")
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

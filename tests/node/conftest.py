"""What the tests of the nodes' environment have in common."""

from __future__ import annotations

import pytest

REPORTS_ENV = ("TENSORBOARD_LOGGING_DIR", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RUN_GROUP")


@pytest.fixture(autouse=True)
def own_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that is put together in the process of a test says there where its reports go, for good."""
    for name in REPORTS_ENV:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

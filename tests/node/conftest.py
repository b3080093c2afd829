"""What the tests of the nodes' environment have in common."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

REPORTS_ENV = ("TENSORBOARD_LOGGING_DIR", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RUN_GROUP")


@pytest.fixture(autouse=True)
def own_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that is put together in the process of a test says there where its reports go, for good."""
    for name in REPORTS_ENV:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model and its prompts. Who changes the model copies it."""
    from tests.node.trainer.rig import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Another such folder, whose model has a chat template and calls tools."""
    from tests.node.trainer.rig_tools import make_chatty

    folder = tmp_path_factory.mktemp("chatty")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    make_chatty(folder)
    return folder

"""Where TRL reports to besides the run's store: TensorBoard, Weights & Biases, the table of completions.

What lies in files of theirs stays on the trainer's machine, in REPORTS. The run's store has the metrics and the
completions in any case.
"""

from __future__ import annotations

import netrc
import os
import shutil
from pathlib import Path
from typing import Any

import structlog
from transformers.integrations import get_reporting_integration_callbacks

from tasks.trainer.sinks import Beginning, keep_sinks
from tasks.trainer.user_objects import BadSpec, first_line

log = structlog.get_logger()

REPORTS = "reports"  # in the trainer's working folder
COMPLETIONS = "completions"  # TRL's name for its folder of tables
NO_KEY_NEEDED = ("offline", "disabled", "dryrun")


def prepare_reports(config: Any, workdir: Path) -> None:
    """Say where files of reports go, and try what `report_to` names. Raises BadSpec for what is not there."""
    folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or workdir / REPORTS / "tensorboard"
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(Path(folder, config.run_name))  # a folder is a run to TensorBoard
    for kind in _kinds(config):
        try:
            kind()
        except (RuntimeError, ImportError) as error:
            raise BadSpec(f"grpo.report_to: {first_line(error)} It belongs into trainer.setup") from error
    if "wandb" in config.report_to and not _has_wandb_key():
        hint = "export WANDB_API_KEY and name it under `secrets:`, or set WANDB_MODE: offline in trainer.env"
        raise BadSpec(f"grpo.report_to: wandb has no key here; {hint}")


def name_reports(config: Any, run_name: str, run_id: str, timeline: int) -> None:
    """Have each timeline be one run of the sinks', however often its trainer is started again.

    A rollback takes steps back. No sink has a word for that: drawn as one run, abandoned steps and those that
    replace them would be one curve. What run.yaml says of a name or in `trainer.env` stays.

    Args:
        config: GRPOConfig; its `run_name` gets the timeline.
        run_name: the run's own, where run.yaml names no other in `grpo`.
        run_id: unique among the runs of a store's.
        timeline: that this trainer trains.
    """
    group = config.run_name or run_name
    config.run_name = f"{group}-t{timeline}" if timeline else group
    os.environ.setdefault("WANDB_RUN_ID", f"{run_id}-t{timeline}")
    os.environ.setdefault("WANDB_RESUME", "allow")
    os.environ.setdefault("WANDB_RUN_GROUP", group)


def keep_reports(trainer: Any, workdir: Path, beginning: Beginning) -> None:
    """Have TRL's tables of completions on the disk and not in the spool, and the reports as `sinks` says."""
    kinds = tuple(_kinds(trainer.args))
    keep_sinks([one for one in trainer.callback_handler.callbacks if isinstance(one, kinds)], beginning)
    if not trainer.log_completions:
        return
    folder, link = workdir / REPORTS / COMPLETIONS, Path(trainer.args.output_dir, COMPLETIONS)
    folder.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        shutil.rmtree(link, ignore_errors=True)
        link.symlink_to(folder)
    log.info("completions_are_written", folder=str(folder), stored=False)


def _kinds(config: Any) -> list[Any]:
    kinds: list[Any] = get_reporting_integration_callbacks(config.report_to)
    return kinds


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in NO_KEY_NEEDED:
        return True
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False

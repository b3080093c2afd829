"""Set up TRL's reports other than the run's store: TensorBoard, Weights & Biases, tables of completions.

transformers' own callbacks send the reports. Each timeline is one run of the service, which a restarted trainer
resumes; a step retrained after a crash is logged again. Files stay on the trainer's machine, in
REPORTS. The run's store always has the metrics and the completions.
"""

from __future__ import annotations

import functools
import importlib
import json
import netrc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from transformers.integrations import get_reporting_integration_callbacks

from grpo_orch.tasks.trainer.user_objects import BadSpec, first_line, passes

log = structlog.get_logger()

REPORTS = "reports"  # in the trainer's working folder
COMPLETIONS = "completions"  # TRL's name for its folder of tables
NO_KEY_NEEDED = ("offline", "disabled", "dryrun")
TIMELINE_TAG = "grpo_orch.timeline"  # identifies MLflow's run of a timeline
# By default MLflow retries seven times, two minutes each, and TRL sends its timings in the middle of a step.
MLFLOW_DEFAULTS = {
    "MLFLOW_ENABLE_ASYNC_LOGGING": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}


def prepare_reports(config: Any, workdir: Path) -> None:
    """Set where report files go, and import what `report_to` names. Raises BadSpec for a missing package."""
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
    """Make each timeline one run of each service, across restarts of its trainer.

    With one run for all timelines, abandoned steps and their replacements would share a curve. Names in run.yaml
    and `trainer.env` take precedence.

    Args:
        config: GRPOConfig; the timeline is appended to its `run_name`.
        run_name: the run's name, used if `grpo` in run.yaml sets none.
        run_id: unique among the runs of a store.
        timeline: the timeline that this trainer trains.
    """
    group = config.run_name or run_name
    config.run_name = f"{group}-t{timeline}" if timeline else group
    os.environ.setdefault("WANDB_RUN_ID", f"{run_id}-t{timeline}")
    os.environ.setdefault("WANDB_RESUME", "allow")
    os.environ.setdefault("WANDB_RUN_GROUP", group)


def keep_reports(trainer: Any, workdir: Path, timeline_id: str, *, is_first: bool) -> None:
    """Write TRL's tables of completions to the disk instead of the spool, and guard training from report errors.

    Args:
        timeline_id: unique among the timelines of all runs.
        is_first: this is the run's first trainer.
    """
    kinds = tuple(_kinds(trainer.args))
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, kinds):
            guard_callback(callback, timeline_id, is_first=is_first)
    if not trainer.log_completions:
        return
    folder, link = workdir / REPORTS / COMPLETIONS, Path(trainer.args.output_dir, COMPLETIONS)
    folder.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        shutil.rmtree(link, ignore_errors=True)
        link.symlink_to(folder)
    log.info("completions_folder", folder=str(folder), stored=False)


def guard_callback(callback: Any, timeline_id: str, *, is_first: bool) -> None:
    """Make an error disable the service's callback instead of ending the training.

    The run's first trainer raises BadSpec if the service cannot start, because that is a mistake in run.yaml.
    """
    service, failed = type(callback).__name__.removesuffix("Callback"), False

    def call(name: str, event: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        nonlocal failed
        if failed:
            return
        starts = name == "on_train_begin"
        try:
            if starts and service == "MLflow":
                _resume_mlflow(timeline_id)
            event(*args, **kwargs)
        except Exception as error:  # each service raises its own types
            reason = f"{type(error).__name__}: {first_line(error)}"
            if starts and is_first:
                if passes(error):
                    raise
                raise BadSpec(f"grpo.report_to: {service}: {reason}") from error
            failed = True
            log.warning("report_disabled", service=service, error=reason)

    for name in [name for name in dir(callback) if name.startswith("on_")]:
        setattr(callback, name, functools.partial(call, name, getattr(callback, name)))


def _resume_mlflow(timeline_id: str) -> None:
    """Find an existing run of the timeline by a tag, because MLflow chooses the run ids."""
    for name, value in MLFLOW_DEFAULTS.items():
        os.environ.setdefault(name, value)
    if os.environ.get("MLFLOW_RUN_ID"):
        return
    tags = {**json.loads(os.environ.get("MLFLOW_TAGS") or "{}"), TIMELINE_TAG: timeline_id}
    os.environ["MLFLOW_TAGS"] = json.dumps(tags)
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME")
    runs = importlib.import_module("mlflow").search_runs(
        filter_string=f"tags.`{TIMELINE_TAG}` = '{timeline_id}'",
        max_results=1,
        output_format="list",
        **({"experiment_names": [experiment]} if experiment else {"search_all_experiments": True}),
    )
    if runs:
        os.environ["MLFLOW_RUN_ID"] = runs[0].info.run_id


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

"""The secrets that the code on a run's machines needs, such as HF_TOKEN: which, and where their values come from.

Values are read from the environment of whoever starts or resumes the run, go to the machines with their launch,
and are written nowhere. Only the names that run.yaml lists are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from checkpoint.security.redaction import NAMES_ENV
from policies.model.spec import RunSpec, datasets_of
from policies.model.vocabulary import Role

HUB = ("HF_TOKEN",)
# What the trainer's sinks log in with, by the word for them in `grpo.report_to`; it need not be named.
SINKS: dict[str, tuple[str, ...]] = {
    "wandb": ("WANDB_API_KEY",),
    "comet_ml": ("COMET_API_KEY",),
    "mlflow": ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    "neptune": ("NEPTUNE_API_TOKEN",),
    "clearml": ("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY"),
    "dagshub": ("DAGSHUB_USER_TOKEN",),
    "swanlab": ("SWANLAB_API_KEY",),
    "trackio": HUB,
}


def usual(spec: RunSpec, role: Role) -> list[str]:
    """What a role needs, as a rule, for the models, data and sinks that the run names."""
    hub = _is_of_hub(spec.trainer.model, spec)
    if role is Role.ROLLOUT:
        return list(HUB if hub else ())
    data = (*datasets_of(spec.trainer.dataset), *datasets_of(spec.trainer.eval_dataset))
    hub = hub or any(one.path and _is_of_hub(one.path, spec) for one in data)
    hub = hub or any("/" in one and _is_of_hub(one, spec) for one in spec.trainer.reward_funcs)
    names = list(HUB if hub else ())
    for sink in _sinks(spec):
        names += SINKS.get(sink, ())
    return list(dict.fromkeys(names))


def secrets_for(spec: RunSpec, role: Role, environment: Mapping[str, str]) -> dict[str, str]:
    """The secrets of a role, as far as the environment has them: those that run.yaml names, and the usual ones."""
    names = dict.fromkeys((*spec.secrets, *usual(spec, role)))
    return {name: environment[name] for name in names if environment.get(name)}


def handed_on(secrets: Mapping[str, str]) -> dict[str, str]:
    """The secrets as a machine's environment has them, with the list of their names."""
    return {**secrets, NAMES_ENV: ",".join(secrets)} if secrets else {}


def all_secrets(spec: RunSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Those of every role, and the daemon's own."""
    found = {name: value for role in Role for name, value in secrets_for(spec, role, environment).items()}
    return found | notify_urls(spec, environment)


def notify_urls(spec: RunSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the URLs that the daemon sends notifications to, by variable. No machine of the run receives them."""
    return {name: environment[name] for name in spec.notify.url_env if environment.get(name)}


def missing(spec: RunSpec, environment: Mapping[str, str]) -> str:
    """What is wrong with the environment, in a line that names the variables; empty where nothing is."""
    names = [name for name in spec.secrets if not environment.get(name)]
    if not names:
        return ""
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    return f"{', '.join(names)} {verb} not set here, and `secrets` of run.yaml names {them}"


def _sinks(spec: RunSpec) -> list[str]:
    wanted = spec.grpo.get("report_to") or ()
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    return list(SINKS) if "all" in names else names


def _is_of_hub(name: str, spec: RunSpec) -> bool:
    """Whether a model's or a dataset's name is one on the hub: no such folder or file is at hand."""
    return not name.startswith(("/", "./", "../", "~")) and not Path(spec.workdir, name).exists()

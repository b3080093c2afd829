"""Secrets and run.yaml, which is copied to the store: it names them, and must not hold one."""

from __future__ import annotations

import re
from typing import Any

from orchestrator.config.effective import EffectiveRun
from orchestrator.config.problems import Findings, KeyPath
from policies.model.spec import RunSpec

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = "GRPO_ORCH_"
EXPECTED = "expected the name of an environment variable, as in HF_TOKEN"
EXPECTED_URL = "expected the name of an environment variable that holds the URL, as in SLACK_URL"
# What begins as the keys of well-known services do.
_VALUE = re.compile(
    r"""(?<![A-Za-z0-9_-])(?:
        hf_[A-Za-z0-9]{16,}                      # Hugging Face
      | sk-[A-Za-z0-9_-]{16,}                    # OpenAI, Anthropic and others
      | wandb_v1_[A-Za-z0-9_]{16,}
      | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,} | glpat-[A-Za-z0-9_-]{16,}
      | (?:AKIA|ASIA)[0-9A-Z]{16}                # AWS
      | AIza[A-Za-z0-9_-]{35}                    # Google
      | xox[abprs]-[A-Za-z0-9-]{10,}             # Slack
      | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----
    )""",
    re.VERBOSE,
)
_WANDB = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"(^|_)(TOKEN|SECRET|KEY|APIKEY|PASSWORD|PASSWD)(_|$)")
_OF_A_FILE = re.compile(r"_(FILE|PATH|DIR|URL|ID|NAME)$")
_NO_SECRET = re.compile(r"(?i)|true|false|none|null|[-+.0-9e]+|/.*")
NAME_IT = "this file is copied to the store; export it where the run is started, and name it under `secrets:`"


def check_secrets(run: EffectiveRun, findings: Findings) -> None:
    """Check `secrets`: names, each once, none that an `env` sets. Messages quote no value that is no name."""
    names: list[Any] = run.at("secrets") or []
    for index, name in enumerate(names):
        here: KeyPath = ("secrets", index)
        if not _VARIABLE.fullmatch(name) or looks_like_secret("", name):
            findings.add(
                here, f"{EXPECTED}; a secret itself does not belong in a file that is copied to the store"
            )
        elif name.startswith(_OURS):
            findings.add(here, f"{name} is set by grpo-orch itself; remove it")
        elif name in names[:index]:
            findings.add(here, f"{name} is named twice; remove one of the two")
        else:
            for section in ("trainer", "rollout"):
                if name in (run.at(section, "env") or {}):
                    findings.add(here, f"{name} is set in {section}.env as well; remove it there")
    _check_notify_urls(run, names, findings)


def _check_notify_urls(run: EffectiveRun, secrets: list[Any], findings: Findings) -> None:
    for index, name in enumerate(run.at("notify", "url_env") or ()):
        here = ("notify", "url_env", index)
        if not _VARIABLE.fullmatch(name) or looks_like_secret("", name):
            findings.add(
                here, f"{EXPECTED_URL}; the URL itself does not belong in a file that is copied to the store"
            )
        elif name.startswith(_OURS):
            findings.add(here, f"{name} is set by grpo-orch itself; use another name")
        elif name in secrets:
            findings.add(here, f"{name} is for the daemon only; remove it from `secrets`, which machines receive")


def looks_like_secret(name: str, value: str) -> bool:
    """Whether an environment variable of that name and value is likely to be one."""
    if _VALUE.search(value) or _WANDB.fullmatch(value):
        return True
    upper = name.upper()
    return bool(_NAME.search(upper)) and not _OF_A_FILE.search(upper) and not _NO_SECRET.fullmatch(value)


def note_secrets(spec: RunSpec, findings: Findings) -> None:
    """Note what looks like a secret in the file."""
    for section, part in (("trainer", spec.trainer), ("rollout", spec.rollout)):
        for name, value in part.env.items():
            if looks_like_secret(name, value):
                findings.notice((section, "env", name), f"looks like a secret, and {NAME_IT}")
        if _VALUE.search(part.setup):
            findings.notice((section, "setup"), f"holds what looks like a secret, and {NAME_IT}")

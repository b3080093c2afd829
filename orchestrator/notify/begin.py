"""The notifier of a run, as its run.yaml wants it."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

import structlog

from checkpoint.records.documents import RunRecord
from checkpoint.store.run_store import Store
from orchestrator.home.run_secrets import webhook_url
from orchestrator.notify.channels import Channel, Command, Webhook
from orchestrator.notify.notifier import Notifier
from policies.model.spec import Notify

log = structlog.get_logger()


def begin(store: Store, record: RunRecord, environment: MutableMapping[str, str]) -> Notifier:
    """Start telling. The webhook's URL is taken out of `environment`, which the processes of nodes inherit."""
    wanted, channels = record.spec.notify, list[Channel]()
    if record.evaluation is not None:
        wanted = Notify()  # whoever started it waits for it
    if wanted.webhook_env and (url := webhook_url(record.spec, environment)):
        channels.append(Webhook(url))
    elif wanted.webhook_env:
        log.warning("no_webhook", missing=wanted.webhook_env)
    environment.pop(record.spec.notify.webhook_env or "", None)
    if wanted.command:
        folder = record.spec.workdir if Path(record.spec.workdir).is_dir() else None
        channels.append(Command(wanted.command, folder))
    return Notifier(store, record.spec.name, record.run_id, channels)

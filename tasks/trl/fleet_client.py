"""What TRL takes for its client of a vLLM server: completions from the fleet, weights into the run store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, Protocol

import structlog
import torch

from checkpoint.records.rollouts import Rollout, Session
from policies.model.vocabulary import PolicyVersion
from policies.serving.canary import Canary
from policies.serving.wire import PolicyRef
from tasks.completions.drought import OwnTurn
from tasks.completions.rollout_source import RolloutSource
from tasks.machine.leaving import LeaveNow
from tasks.storing.publish_adapter import AdapterPublisher
from tasks.storing.tensors import Unread
from tasks.trl.own_share import OwnShare
from tasks.trl.windows_ahead import WindowsAhead

log = structlog.get_logger()


class Instead(Enum):
    """What every process reads in the place of each completion, through TRL's broadcast of them."""

    LEAVING = "the trainer is to leave"
    WEIGHTS_FIRST = "they have to publish the weights together before there are any"
    OWN_TURN = "they have to make some together, for no rollout node is there"


class NoPrompt(Enum):
    """In the place of a prompt: there is none, and its completion has no token."""

    NO_PROMPT = "another process has one more"


NO_PROMPT = NoPrompt.NO_PROMPT
Prompt = list[int] | NoPrompt
Weights = Iterator[tuple[str, torch.Tensor | Unread]]


class _WeightsFirst(Exception):
    """Completions have to be generated, and the weights are with all processes."""


_SAID: dict[type[Exception], Instead] = {
    LeaveNow: Instead.LEAVING,
    OwnTurn: Instead.OWN_TURN,
    _WeightsFirst: Instead.WEIGHTS_FIRST,
}


class Publishes(Protocol):
    """What makes a policy's weights known to those who generate."""

    def publish(
        self,
        version: PolicyVersion,
        named: Iterable[tuple[str, torch.Tensor | Unread]],
        canary: Canary | None,
        since_step: int | None = None,
    ) -> PolicyRef:
        """Older policies may go, but for those since that step. Raises StoreError."""

    def published(self, version: PolicyVersion) -> PolicyRef | None:
        """The stored policy of that version, if there is one. Raises StoreError."""


class FleetClient:
    """What TRL takes for its VLLMClient. `rollouts` answers its generate calls.

    Attributes:
        on_policy_gone: called where the weights compute no number, with the present step and the first that may be
            to blame: no node would serve them.
        foresees: whether to say what an evaluation will ask for; not where the trainer's own model would take it
            all as one batch.
        own_share: what this process makes where no rollout node can be had; None: such nodes are waited for.
        windows: what is asked for ahead; None: nothing, and each step is sampled from its own policy.
        trained_on: the training calls since somebody emptied it.
    """

    def __init__(self, rollouts: RolloutSource) -> None:
        self._rollouts = rollouts
        self._trainer: Any = None
        self._publisher: Publishes | None = None
        self._timeline = 0
        self._weights: Weights | None = None
        self._published: PolicyRef | None = None
        self._canary: Canary | None = None  # what the weights of the present step compute
        self._finite_at: int | None = None  # the last step whose weights computed numbers
        self.on_policy_gone: Callable[[int, int], None] = lambda *_: None
        self.foresees = False
        self.own_share: OwnShare | None = None
        self.windows: WindowsAhead | None = None
        self._turn = (-1, 0)  # the window, and how many of its calls are made
        self.trained_on: list[Rollout] = []

    def attach(self, trainer: Any, publisher: Publishes | None, timeline: int) -> None:
        """Name the trainer whose steps these are, before its first generate call. Its first process publishes."""
        self._trainer, self._publisher, self._timeline = trainer, publisher, timeline

    @property
    def publishes_adapters(self) -> bool:
        """Whether a policy is the adapter that is trained, and not the weights with it."""
        return isinstance(self._publisher, AdapterPublisher)

    def take_canary(self, canary: Canary) -> None:
        """Take what the weights of the present step compute."""
        self._canary, step = canary, self._version().step
        if any(one is not None for one in canary.logprobs):
            self._finite_at = step
        else:
            self.on_policy_gone(step, step if self._finite_at is None else self._finite_at + 1)

    def foresee(self, calls: list[list[list[int]]], samples: int) -> None:
        """Say which prompts the evaluation of the present step will ask for, generate call by generate call."""
        self._rollouts.foresee(self._version(), calls, samples)

    def get_server_info(self) -> dict[str, Any]:
        """What TRL asks of a server: every rollout node is started so, and run.yaml cannot change it."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def init_communicator(self, **_: Any) -> None:
        """Nothing: nodes pull weights from the run store, and no collective joins them to the trainer."""

    def close_communicator(self) -> None:
        """Nothing, as above."""

    def reset_prefix_cache(self) -> None:
        """Nothing: a node does so itself when it loads a policy."""

    def image_features(self, *_: Any) -> Any:
        raise NotImplementedError("prompts with images are not supported by the rollout fleet")

    def update_named_params(self, _metadata: Any, named_params: Weights | None) -> None:
        """Take the weights of the present step; None where it takes all processes to read them.

        They are published when the first completion of the step has to be generated: a replayed step needs none.
        """
        self._weights, self._published = named_params, None

    def generate(
        self,
        prompts: list[Prompt],
        features: list[Any] | None = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return `n` completions of each prompt in TRL's shapes, prompt by prompt.

        One that no node took is its end alone, without a log-probability: see `tasks.trl.parts.refused`. For
        NO_PROMPT nothing is asked (`tasks.trl.parts.turns`).
        """
        if features is not None or logprobs != 0:
            raise NotImplementedError(
                "the rollout fleet serves text prompts, and the sampled tokens' logprobs alone"
            )
        sampling: dict[str, Any] = {
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "max_tokens": max_tokens,
        }  # the gateway always returns the log-probability of each sampled token, which is what `logprobs=0` asks
        if structured_outputs_regex is not None:
            sampling["structured_outputs"] = {"regex": structured_outputs_regex}
        sampling.update(generation_kwargs or {})
        asked: list[Any] = [prompt for prompt in prompts if prompt is not NO_PROMPT]
        rollout = self._complete(asked, n, sampling)
        if isinstance(rollout, Instead):  # in the place of completions, for which the others wait
            return {"prompt_ids": prompts, "completion_ids": [rollout] * (len(prompts) * n), "logprobs": None}
        return self._in_shape(prompts, n, rollout)

    def run_agents(
        self, rows: list[dict[str, Any]], samples: int, sampling: dict[str, Any]
    ) -> list[Session] | Instead:
        """Return `samples` sessions of the run's agent on each row, row by row."""
        rollout = self._complete(rows, samples, sampling)
        return rollout if isinstance(rollout, Instead) else rollout.sessions

    def _complete(self, prompts: list[Any], samples: int, sampling: dict[str, Any]) -> Rollout | Instead:
        training = bool(self._trainer.model.training)
        windows = self.windows if training else None
        try:
            of_window = {} if windows is None else self._of_window(windows, samples, sampling)
            rollout = self._rollouts.complete(
                self._version(),
                prompts,
                samples,
                sampling,
                training=training,
                policies=self._policy,
                **of_window,
            )
        except (LeaveNow, OwnTurn, _WeightsFirst) as told:
            return _SAID[type(told)]
        if training:
            self._turn = self._turn[0], self._turn[1] + 1
            self.trained_on.append(rollout)
        return rollout

    def _of_window(self, windows: WindowsAhead, samples: int, sampling: dict[str, Any]) -> dict[str, Any]:
        """The policy and the number of the present window's next call. With a round's first one, all calls whose
        policies are there are begun."""
        window = windows.present
        if self._turn[0] != window:
            if self._turn[0] < 0:
                windows.start()
            if windows.begins_round(window):
                self._rollouts.begin(windows.calls(samples, sampling), self._policy)
            self._turn = window, 0
        return {"policy": windows.policy_of(window), "number": windows.number_of(*self._turn)}

    def _in_shape(self, prompts: list[Prompt], n: int, rollout: Rollout) -> dict[str, Any]:
        """The completions as TRL reads a server's answer."""
        end = [self._trainer.eos_token_ids[0]]
        made = iter(rollout.completions)
        found = [next(made) if prompt is not NO_PROMPT else None for prompt in prompts for _ in range(n)]
        completion_ids = [[] if one is None else end if one.refused else one.token_ids for one in found]
        of_tokens = [[] if one is None else [None] if one.refused else one.logprobs for one in found]
        return {
            "prompt_ids": prompts,
            "completion_ids": completion_ids,
            "logprobs": [[[logprob] for logprob in of_one] for of_one in of_tokens],
            "logprob_token_ids": [[[token] for token in of_one] for of_one in completion_ids],
        }

    def take_own_turn(self, accelerator: Any) -> None:
        """In all processes, at Instead.OWN_TURN: make some of the completions with the trainer's own model."""
        assert self.own_share is not None
        self.own_share.make(accelerator, training=bool(self._trainer.model.training))

    def _version(self) -> PolicyVersion:
        return PolicyVersion(self._timeline, self._trainer.state.global_step)

    def publish(self) -> PolicyRef:
        """Publish the weights of this step, once. Raises StoreError."""
        if self._published is None:
            if self._publisher is None:
                raise RuntimeError("TRL generates before it has synchronized its weights")
            if self._weights is None:
                raise _WeightsFirst
            oldest = None if self.windows is None else self.windows.policy_of(self.windows.present).step
            self._published = self._publisher.publish(self._version(), self._weights, self._canary, oldest)
            self._weights = None
        return self._published

    def _policy(self, version: PolicyVersion) -> PolicyRef:
        """The policy of the present step, published now, or an older one that is in the store.

        One that is not, since `max_staleness` was less when its step was taken, is replaced by the present one.
        Raises StoreError.
        """
        if version != self._version():
            assert self._publisher is not None
            found = self._publisher.published(version)
            if found is not None:
                return found
            log.warning("older_policy_not_stored", policy=str(version), instead=str(self._version()))
        return self.publish()

"""A machine on which installations cost nothing: it records each program, and fails or stops on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_orch.orchestrator.node_installer import ThisMachine


@dataclass
class InstallerStandIn(ThisMachine):
    """See `node_installer.ThisMachine`.

    `fails` and `interrupted` are words: the first program whose arguments contain one ends that way.
    """

    gpus: str = ""
    pip_config: str = ""
    torch_versions: str = "2.13.0"
    uv: str | None = "/opt/uv"
    library: bool = True
    free: float = 100.0
    system: tuple[str, str] = ("Linux", "x86_64")
    fails: str = ""
    interrupted: str = ""
    ran: list[str] = field(default_factory=list)
    environments: list[Mapping[str, str]] = field(default_factory=list)

    def run(self, argv: Sequence[str], environment: Mapping[str, str]) -> int:
        self.ran.append(" ".join(argv))
        self.environments.append(environment)
        if self.interrupted and self.interrupted in argv:
            raise KeyboardInterrupt
        if self.fails and self.fails in argv:
            return 2
        if "venv" in argv:
            python = Path(argv[-1], "bin", "python")
            python.parent.mkdir(parents=True)
            python.touch()
        return 0

    def output_of(self, argv: Sequence[str]) -> str:
        match argv[-2:]:
            case ["nvidia-smi", "-L"]:
                return self.gpus
            case ["config", "list"]:
                return self.pip_config
            case ["versions", "torch"]:
                return self.torch_versions
        raise AssertionError(argv)

    def which(self, program: str) -> str | None:
        assert program == "uv"
        return self.uv

    def has_library(self, name: str) -> bool:
        assert name == "libnuma.so.1"
        return self.library

    def free_gb(self, _folder: Path, /) -> float:
        return self.free

    def platform(self) -> tuple[str, str]:
        return self.system

"""Backend `remote`: sandboxes of a service over HTTP, which freezes and forks them itself.

Protects from: what the service protects from, and `capabilities` repeats.
Does not protect from: the service, which sees every file and command.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Self

import httpx

from agentgym.errors import BackendUnavailable, PathRefused, SandboxError, SnapshotError, SnapshotUnsupported
from agentgym.sandbox import DEFAULT_OUTPUT_BYTES, Capabilities, Change, ExecResult, Sandbox, SandboxSpec
from agentgym.types import Level


class Api:
    """One connection; every failure is a `SandboxError`, so that it is never taken for the policy's."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"X-API-Key": key})
        self.capabilities = Capabilities(Level.SHELL, frozenset())

    def ask(self, method: str, path: str, body: object = None, *, timeout_s: float = 30.0) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise SandboxError(f"{method} {path}: {error}; is the service reachable?") from error
        if answer.status_code == 422:  # what it answers for links, devices and paths that are not there
            raise PathRefused(f"{method} {path}: {answer.text}")
        if answer.is_error:
            raise SandboxError(f"{method} {path}: status {answer.status_code}, {answer.text}; see the service's log")
        found: dict[str, Any] = answer.json()
        return found

    def close(self) -> None:
        self._http.close()


class RemoteBackend:
    name = "remote"

    def __init__(self, url: str, key: str) -> None:
        self._api = Api(url, key)
        self._live: set[RemoteSandbox] = set()

    def probe(self) -> Capabilities:
        """Ask what the service holds, and see one sandbox answer."""
        try:
            told = self._api.ask("GET", "/capabilities")
            self._api.capabilities = Capabilities(Level[told["level"]], frozenset(told["isolation"]), told["missing"])
            sandbox = self.create(SandboxSpec())
            answer = sandbox.run("echo works").stdout
            sandbox.close()
        except SandboxError as error:
            raise BackendUnavailable(f"backend 'remote': {error}; or use backend 'namespace'") from error
        if answer != "works\n":
            raise BackendUnavailable(f"backend 'remote': a first command answered {answer!r}; see the service's log")
        return self._api.capabilities

    def create(self, spec: SandboxSpec) -> RemoteSandbox:
        files = [
            {"path": f.path, "kind": f.kind, "mode": f.mode, "data": base64.b64encode(f.data).decode()}
            for f in spec.files
        ]
        body = {"files": files, "workdir": spec.workdir, "env": dict(spec.env), "seed": spec.seed}
        return RemoteSandbox(self._api, self._api.ask("POST", "/sandboxes", body)["id"], self._live)

    def close(self) -> None:
        for sandbox in list(self._live):
            sandbox.close()
        self._api.close()


class RemoteSandbox:
    backend = "remote"

    def __init__(self, api: Api, id: str, live: set[RemoteSandbox]) -> None:
        self.id, self.capabilities, self._api, self._live = id, api.capabilities, api, live
        live.add(self)

    def run(self, command: str, *, timeout_s: float = 30.0, max_output_bytes: int = DEFAULT_OUTPUT_BYTES) -> ExecResult:
        body = {"command": command, "timeout_s": timeout_s, "max_output_bytes": max_output_bytes}
        # the service ends the command; we only give up where the service hangs
        return ExecResult(**self._ask("POST", "/run", body, timeout_s=timeout_s + 30.0))

    def read(self, path: str, *, max_bytes: int = DEFAULT_OUTPUT_BYTES) -> bytes:
        return base64.b64decode(self._ask("POST", "/read", {"path": path, "max_bytes": max_bytes})["data"])

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self._ask("POST", "/write", {"path": path, "mode": mode, "data": base64.b64encode(data).decode()})

    def snapshot(self, *, require: Level | None = None) -> RemoteSnapshot:
        level = self.capabilities.level
        if require is not None and require > level:
            raise SnapshotUnsupported(f"backend 'remote' keeps level {level}; level {require} was required")
        return RemoteSnapshot(self._api, self._ask("POST", "/snapshots", {}), self._live)

    def close(self) -> None:
        if self in self._live:
            self._live.remove(self)
            self._api.ask("DELETE", f"/sandboxes/{self.id}")

    def _ask(self, method: str, path: str, body: object, *, timeout_s: float = 30.0) -> dict[str, Any]:
        if self not in self._live:
            raise SandboxError(f"sandbox {self.id} is closed; fork a snapshot of it, or create another")
        return self._api.ask(method, f"/sandboxes/{self.id}{path}", body, timeout_s=timeout_s)


class RemoteSnapshot:
    def __init__(self, api: Api, made: Mapping[str, Any], live: set[RemoteSandbox]) -> None:
        self.id: str = made["id"]
        self.level, self.losses = Level[made["level"]], tuple(made["losses"])  # never a success without the data
        self._api, self._live, self._released = api, live, False

    def fork(self, n: int = 1) -> list[Sandbox]:
        ids = self._ask("POST", "/forks", {"n": n})["ids"]
        return [RemoteSandbox(self._api, id, self._live) for id in ids]

    def digest(self) -> str:
        return str(self._ask("GET", "/digest")["digest"])

    def changes(self) -> dict[str, Change]:
        return {path: Change(**told) for path, told in self._ask("GET", "/changes").items()}

    def inspect(self, files: Mapping[str, bytes], command: str, *, timeout_s: float) -> ExecResult:
        raise SandboxError("backend 'remote' cannot run a grader out of the agent's reach; use backend 'namespace'")

    def release(self) -> None:
        if not self._released:
            self._ask("DELETE", "")
            self._released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        if self._released:
            raise SnapshotError(f"snapshot {self.id} was released; take another one")
        return self._api.ask(method, f"/snapshots/{self.id}{path}", body)

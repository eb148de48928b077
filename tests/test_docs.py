"""What docs/sandboxes.md shows is true: its backend works against a service, and its words are the code's."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agentgym.errors import BackendUnavailable, PathRefused, SandboxError, SnapshotError, SnapshotUnsupported
from agentgym.sandbox import Backend, FileSpec, SandboxSpec, backend_names
from agentgym.sandboxes.local import LocalBackend
from agentgym.types import Level

if TYPE_CHECKING:
    import remote_sketch


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "sandboxes.md").read_text("utf-8")


def test_the_sketch_in_the_page_is_the_one_that_is_tested(checkout: Path, page: str) -> None:
    sketch = (checkout / "tests" / "remote_sketch.py").read_text("utf-8")
    assert re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0] == sketch


def test_every_backend_says_what_it_protects_from_and_loses(page: str) -> None:
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE))
    assert sorted(sections) == backend_names()
    for name, text in sections.items():
        for word in ("Protects from", "Does not protect from", "Keeps", "Loses"):
            assert f"**{word}.**" in text, (name, word)


def test_links_of_the_page_and_of_the_readme_lead_somewhere(checkout: Path, page: str) -> None:
    assert "docs/sandboxes.md" in (checkout / "README.md").read_text("utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", page):
        assert (checkout / "docs" / target).exists(), target
    for module in re.findall(r"`(\w+\.py)`", page):
        assert (checkout / "sandboxes" / module).exists() or module == "remote.py", module


class Service(BaseHTTPRequestHandler):
    """A remote with the same verbs, standing on the `local` backend."""

    def handle_any(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or b"null")
        try:
            if self.headers["X-API-Key"] != "secret":
                self.answer(401, "wrong key")
                return
            self.answer(200, json.dumps(self.serve([self.command, *self.path.split("/")[1:]], body)))
        except PathRefused as error:
            self.answer(422, str(error))
        except (SandboxError, KeyError) as error:
            self.answer(404, str(error))

    do_GET = do_POST = do_DELETE = handle_any

    def serve(self, call: list[str], body: Any) -> Any:
        store, backend = self.server.store, self.server.backend  # type: ignore[attr-defined]
        match call:
            case ["GET", "capabilities"]:
                found = backend.probe()
                return {"level": found.level.name, "isolation": sorted(found.isolation), "missing": found.missing}
            case ["POST", "sandboxes"]:
                files = [FileSpec(f["path"], f["kind"], base64.b64decode(f["data"]), f["mode"]) for f in body["files"]]
                spec = SandboxSpec(tuple(files), body["workdir"], tuple(body["env"].items()), body["seed"])
                return self.keep(backend.create(spec))
            case ["POST", "sandboxes", name, "run"]:
                return asdict(store[name].run(**body))
            case ["POST", "sandboxes", name, "read"]:
                return {"data": base64.b64encode(store[name].read(**body)).decode()}
            case ["POST", "sandboxes", name, "write"]:
                return store[name].write(body["path"], base64.b64decode(body["data"]), mode=body["mode"])
            case ["POST", "sandboxes", name, "snapshots"]:
                made = store[name].snapshot()
                return self.keep(made) | {"level": made.level.name, "losses": made.losses}
            case ["POST", "snapshots", name, "forks"]:
                return {"ids": [self.keep(made)["id"] for made in store[name].fork(body["n"])]}
            case ["GET", "snapshots", name, "digest"]:
                return {"digest": store[name].digest()}
            case ["GET", "snapshots", name, "changes"]:
                return {path: asdict(change) for path, change in store[name].changes().items()}
            case ["DELETE", "sandboxes", name]:
                return store.pop(name).close()
            case ["DELETE", "snapshots", name]:
                return store.pop(name).release()
        raise KeyError(" ".join(call))

    def keep(self, made: Any) -> dict[str, Any]:
        self.server.store[made.id] = made  # type: ignore[attr-defined]
        return {"id": made.id}

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def service(workplace: Path) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.store, server.backend = {}, LocalBackend()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
    server.backend.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def sketch(checkout: Path) -> Iterator[Any]:
    """The file as a module, whatever pytest's import mode thinks of folders."""
    spec = importlib.util.spec_from_file_location("remote_sketch", checkout / "tests" / "remote_sketch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def url(service: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{service.server_address[1]}"


@pytest.fixture
def remote(service: ThreadingHTTPServer, sketch: Any) -> Iterator[Backend]:
    backend: Backend = sketch.RemoteBackend(url(service), "secret")
    yield backend
    backend.close()
    assert service.store == {}  # type: ignore[attr-defined]  # nothing is left at the service


def test_the_sketch_forks_a_remote_sandbox(remote: Backend) -> None:
    assert remote.probe().level == Level.SHELL
    box = remote.create(SandboxSpec(files=(FileSpec("note", data=b"first\n"),), env=(("GREETING", "hi"),)))
    box.run("mkdir sub; cd sub; x=5; echo here > file; sleep 60 &")
    with box.snapshot() as snapshot:
        assert any(loss.startswith("process") for loss in snapshot.losses)
        assert sorted(snapshot.changes()) == ["/workspace/sub", "/workspace/sub/file"]
        digest = snapshot.digest()
        left, right = snapshot.fork(2)
        left.run("echo left > file; x=6")
        assert right.run("cat file ../note; echo $x $GREETING").stdout == "here\nfirst\n5 hi\n"
        assert box.run("cat file; echo $x").stdout == "here\n5\n" and snapshot.digest() == digest
    with pytest.raises(SnapshotError, match="released"):
        snapshot.fork()
    left.close()
    left.close()
    with pytest.raises(SandboxError, match="closed"):
        left.run("true")


def test_the_sketch_carries_results_and_refusals(remote: Backend) -> None:
    box = remote.create(SandboxSpec())
    box.write("deep/data", bytes(range(256)), mode=0o600)
    assert box.read("deep/data", max_bytes=3) == b"\0\1\2"
    assert box.run("stat -c %a deep/data; exit 7").stdout == "600\n"
    assert box.run("sleep 60", timeout_s=0.2).timed_out
    with pytest.raises(PathRefused):
        box.read("absent")
    with pytest.raises(SnapshotUnsupported, match="process"):
        box.snapshot(require=Level.PROCESS)


def test_the_sketch_tells_why_a_service_cannot_be_used(service: ThreadingHTTPServer, sketch: Any) -> None:
    for address, key, why in ((url(service), "wrong", "401"), ("http://127.0.0.1:1", "secret", "reachable")):
        backend = sketch.RemoteBackend(address, key)
        with pytest.raises(BackendUnavailable, match=why):
            backend.probe()
        backend.close()


if TYPE_CHECKING:
    # the sketch keeps to the protocol: checked by `make types`
    _: type[Backend] = remote_sketch.RemoteBackend

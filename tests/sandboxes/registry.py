"""A registry of images on loopback, as engines talk to one, with a record of what was asked."""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


def digest(data: bytes) -> str:
    return f"sha256:{sha256(data).hexdigest()}"


@dataclass
class Registry:
    """What it has, and what it was asked for."""

    port: int = 0
    password: str = ""  # "" lets anybody in
    images: dict[str, bytes] = field(default_factory=dict)  # name:tag → manifest
    blobs: dict[str, bytes] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)  # name:tag → how often its manifest was asked for
    pause_seconds: float = 0.0  # before each manifest
    closing: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, layer: bytes, architecture: str = "amd64") -> str:
        """Have an image under ``name:tag``; return the reference to pull it by."""
        packed = gzip.compress(layer, 1)
        config = json.dumps(
            {
                "architecture": architecture,
                "os": "linux",
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
            }
        ).encode()
        for blob in (packed, config):
            self.blobs[digest(blob)] = blob
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "size": len(config), "digest": digest(config)},
            "layers": [{"mediaType": LAYER, "size": len(packed), "digest": digest(packed)}],
        }
        self.images[name] = json.dumps(manifest).encode()
        return self.reference(name)

    def reference(self, name: str) -> str:
        return f"127.0.0.1:{self.port}/{name}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: Registry

    def do_GET(self) -> None:
        password = self.registry.password
        if password and self.headers.get("Authorization") != basic("user", password):
            problem = error("UNAUTHORIZED", "authentication required")
            self.answer(401, problem, {"WWW-Authenticate": 'Basic realm="private"'})
        elif match := re.fullmatch(r"/v2/(.+)/manifests/(.+)", self.path):
            self.manifest(match[1], match[2])
        elif match := re.fullmatch(r"/v2/.+/blobs/(.+)", self.path):
            self.answer(200, self.registry.blobs[match[1]], {"Content-Type": "application/octet-stream"})
        else:
            self.answer(200, b"{}", {})

    def do_HEAD(self) -> None:
        self.do_GET()

    def manifest(self, name: str, reference: str) -> None:
        by_digest = {digest(data): data for data in self.registry.images.values()}
        found = by_digest.get(reference) or self.registry.images.get(f"{name}:{reference}")
        if not reference.startswith("sha256:"):
            self.registry.asked[f"{name}:{reference}"] += 1
            self.registry.closing.wait(self.registry.pause_seconds)
        if found is None:
            self.answer(404, error("MANIFEST_UNKNOWN", "manifest unknown"), {})
        else:
            self.answer(200, found, {"Content-Type": MANIFEST, "Docker-Content-Digest": digest(found)})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        base = {"Content-Type": "application/json", "Docker-Distribution-Api-Version": "registry/2.0"}
        for key, value in {**base, **headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def error(code: str, message: str) -> bytes:
    return json.dumps({"errors": [{"code": code, "message": message}]}).encode()


@contextmanager
def serving(password: str = "") -> Iterator[Registry]:
    registry = Registry(password=password)
    handler = type("Handler", (Handler,), {"registry": registry})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    registry.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield registry
    finally:
        registry.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()

"""A Hugging Face Hub on this machine: enough of its HTTP interface for `push_to_hub` and back."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pytest

_COMMIT = "a" * 40


class HubServer:
    """Serves in a thread; `files` holds what was committed, by path, and `commits` their counts."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.commits: list[list[str]] = []
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def use(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Send huggingface_hub and Transformers here, whatever they have read before."""
        import huggingface_hub
        from huggingface_hub import constants
        from transformers.utils import hub

        monkeypatch.setenv("HF_ENDPOINT", self.endpoint)
        monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
        for name, value in (
            ("ENDPOINT", self.endpoint),
            ("HF_HUB_OFFLINE", False),
            (
                "HUGGINGFACE_CO_URL_TEMPLATE",
                self.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            ),
            ("HF_HUB_DISABLE_XET", True),
            ("HF_HUB_CACHE", str(cache)),
        ):
            monkeypatch.setattr(constants, name, value)
        api = huggingface_hub.HfApi(endpoint=self.endpoint)
        monkeypatch.setattr(hub, "_hf_api", api)


def _handler(hub: HubServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def _send(self, data: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _json(self, answer: Any, status: int = 200, **headers: str) -> None:
            headers["Content_Type"] = "application/json"
            self._send(json.dumps(answer).encode(), status, **headers)

        def do_GET(self) -> None:
            if "whoami" in self.path:
                self._json({"name": "me", "type": "user"})
            elif "/resolve/" in self.path:
                name = self.path.split("?")[0].split("/resolve/")[1].partition("/")[2]
                if name in hub.files:
                    self._send(
                        hub.files[name], X_Repo_Commit=_COMMIT, ETag=f'"{hash(hub.files[name])}"'
                    )
                else:
                    self._json(
                        {"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound",
                        X_Error_Message="Entry not found", X_Repo_Commit=_COMMIT,
                    )  # fmt: skip
            elif "/tree/" in self.path:
                found = [(name, len(data)) for name, data in hub.files.items()]
                keys = {"type": "file", "oid": _COMMIT}
                self._json([{"path": name, "size": size, **keys} for name, size in found])
            else:
                siblings = [{"rfilename": name} for name in hub.files]
                self._json(
                    {
                        "_id": "x", "id": "me/x", "sha": _COMMIT, "siblings": siblings,
                        "private": False, "tags": [], "downloads": 0, "likes": 0,
                    }
                )  # fmt: skip

        do_HEAD = do_GET

        def _body(self) -> bytes:
            if not self.headers.get("Transfer-Encoding"):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def do_POST(self) -> None:
            body = self._body()
            if "repos/create" in self.path:
                name = json.loads(body)["name"]
                self._json({"url": f"{hub.endpoint}/me/{name}", "id": f"me/{name}", "name": name})
            elif "preupload" in self.path:
                paths = [file["path"] for file in json.loads(body)["files"]]
                keys = {"uploadMode": "regular", "shouldIgnore": False}
                self._json({"files": [{"path": path, **keys} for path in paths]})
            elif "commit" in self.path:
                values = [json.loads(line) for line in body.splitlines()]
                added = [entry["value"] for entry in values if entry["key"] == "file"]
                for file in added:
                    hub.files[file["path"]] = base64.b64decode(file["content"])
                hub.commits.append([file["path"] for file in added])
                url = f"{hub.endpoint}/me/x/commit/{_COMMIT}"
                self._json({"commitUrl": url, "commitOid": _COMMIT})
            else:
                self._json({})

    return Handler

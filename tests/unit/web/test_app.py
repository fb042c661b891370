"""The dashboard's HTTP: who gets an answer, what may be asked, what a page may load."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import anyio
import pytest
from starlette.testclient import TestClient

from tests.support.finished_runs import finished_run
from tutti.errors import InputError
from tutti.web.app import listen, make_app
from tutti.web.page import script, style
from tutti.web.run_folder import RunFolder
from tutti.web.saving import save_all

HERE = "http://127.0.0.1:8400"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return RunFolder(finished_run(tmp_path_factory.mktemp("runs") / "run"), "</script><b>run")


def client(run: RunFolder, token: str = "", base: str = HERE) -> TestClient:
    return TestClient(make_app([run], token=token, every_s=0.0), base_url=base)


def test_the_policy_forbids_the_outside(run: RunFolder) -> None:
    answer = client(run).get("/")
    rules = answer.headers["content-security-policy"]
    assert "default-src 'none'" in rules
    assert "unsafe" not in rules
    assert re.findall(r"https?://", answer.text) == []
    inside = re.findall(r"""(?:src|href|fetch\(|import )\s*["'=(]*(https?:[^"')]+)""", script())
    assert inside == []
    assert "url(" not in style().replace("url(data", "")


def test_documents(run: RunFolder) -> None:
    asked = client(run)
    assert asked.get("/api/runs").json()["runs"][0]["steps"] == 6
    assert asked.get("/api/run/0").json()["columns"]["step"] == [1, 2, 3, 4, 5, 6]
    for address in ("/api/nonsense/0", "/api/run/7", "/api/_run/0"):
        assert asked.get(address).status_code == 404
    assert asked.get("/api/run/0/../../etc/passwd").status_code == 404
    assert asked.post("/api/runs").status_code == 405


def test_a_stranger_s_name_for_this_machine_is_refused(run: RunFolder) -> None:
    assert client(run, base="http://evil.example:8400").get("/api/runs").status_code == 421
    assert client(run, base="http://localhost:1").get("/api/runs").status_code == 200
    assert client(run, base="http://[::1]:1").get("/api/runs").status_code == 200


def test_with_a_token_only_who_has_it_gets_an_answer(run: RunFolder) -> None:
    asked = client(run, "secret", "http://10.0.0.5:8400")
    for address in ("/", "/api/runs", "/app.js", "/live/runs", "/save/runs", "/?token=wrong"):
        assert asked.get(address).status_code == 401, address
    assert asked.get("/api/runs", headers={"Authorization": "Bearer secret"}).status_code == 200
    entered = asked.get("/?token=secret", follow_redirects=False)
    assert entered.status_code == 303
    assert "httponly" in entered.headers["set-cookie"].lower()
    assert asked.get("/api/runs").status_code == 200  # the cookie


def test_a_saved_view_is_complete_and_inert(run: RunFolder, tmp_path: Path) -> None:
    answer = client(run).get("/save/run/0")
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.text.count("</script>") == 2  # the data's and the script's own
    save_all([run], tmp_path / "all.html")
    text = (tmp_path / "all.html").read_text(encoding="utf-8")
    values = re.search(r'id="saved">(.*?)</script>', text, re.S)
    assert values is not None
    kept = json.loads(values[1])
    assert set(kept["documents"]) >= {"runs", "run/0", "map/0", "logs/0"}
    assert kept["documents"]["runs"]["runs"][0]["name"] == "</script><b>run"


def test_a_stream_sends_what_changed(run: RunFolder) -> None:
    """The application is asked by hand: a client that waits for the end would wait for ever."""
    app, sent = make_app([run], every_s=0.0), []

    async def ask() -> None:
        enough, asked = anyio.Event(), []

        async def receive() -> dict[str, object]:
            if not asked:
                asked.append(True)
                return {"type": "http.request", "body": b"", "more_body": False}
            await enough.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, object]) -> None:
            sent.append(message)
            if len(sent) == 5:
                enough.set()

        scope = {
            "type": "http", "method": "GET", "path": "/live/run/0", "raw_path": b"/live/run/0",
            "query_string": b"", "headers": [(b"host", b"127.0.0.1")], "http_version": "1.1",
            "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
            "root_path": "",
        }  # fmt: skip
        with anyio.move_on_after(5):
            await app(scope, receive, send)

    anyio.run(ask)
    bodies = [bytes(m.get("body", b"")) for m in sent if m["type"] == "http.response.body"]
    assert bodies[0].startswith(b"data: {")
    assert all(body in (b"", b": the same\n\n") for body in bodies[1:])


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="--port 0"):
            listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(InputError, match="cannot listen"):
        listen("203.0.113.7", 8400)

"""One API process: HTTP on a port that the supervisor has bound.

python -m tutti.server.api_process FOLDER DESCRIPTOR NAME
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

import uvicorn

from tutti.huggingface.tokenizer import Tokenizer, open_tokenizer
from tutti.server.engine_client import EngineClient
from tutti.server.messages import ServerConfig, ServerFolder
from tutti.server.openai.app import Api, make_app
from tutti.server.openai.connections import Connection

DRAIN_S = 25  # that streams have when the server ends
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def tokenizer_of(config: ServerConfig) -> Tokenizer | None:
    """Return the tokenizer that a server is asked to have: its model folder's, or another."""
    asked = config.engine.get("tokenizer")
    if asked is not None:
        return open_tokenizer(asked)
    if any((Path(config.folder) / name).is_file() for name in FILES):
        return open_tokenizer(config.folder)
    return None


def _leave_with(parent: int) -> None:
    """End when the supervisor is gone: nobody else would."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main(folder: Path, descriptor: int, name: str) -> int:
    """Serve until SIGTERM; then end when the last answer is out."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    own = ServerFolder(folder)
    config = own.config()
    api = Api(config, EngineClient(own, name.encode(), config), tokenizer_of(config))
    listening = socket.socket(fileno=descriptor)
    settings = uvicorn.Config(
        make_app(api),
        http=Connection,
        ws="none",
        log_level="error",  # what is no HTTP is answered, and no line of the log each time
        access_log=False,
        timeout_graceful_shutdown=DRAIN_S,
    )
    uvicorn.Server(settings).run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
